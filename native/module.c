/*
 * forebay.format._native: forebay.format.pure in C, on Python's stable ABI.
 *
 * This file converts arguments and results; codec.c does the work. Arguments are checked in the
 * same order as in pure.py, so that both raise the same error for the same call.
 *
 * How the encoders stay within their memory: the pointers and lengths of a message are collected
 * once, in an fb_message. Both its size and its bytes are computed from that, and no Python code
 * runs in between. Everything that may run Python code (the buffer protocol, foreign mappings and
 * sequences) is called before, and its results are kept alive until the message is written.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "codec.h"
#include "ledger.h"
#include "pulsar_columns.h"

#include <stdlib.h>
#include <string.h>

/* Smaller inputs take less time than releasing the interpreter lock and taking it again. */
#define UNLOCKED_BYTES_MIN (32 * 1024)
#define UNLOCKED_ROWS_MIN 1024

#define FEW_TEXTS 32

typedef struct {
    PyObject *message_too_large;
} module_state;

/* ---- arguments ---- */

static int check_count(const char *function, Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd positional arguments, not %zd", function, wanted,
                 given);
    return -1;
}

/* Reads an int in 0..limit; raises ValueError otherwise. */
static int read_number(PyObject *value, uint64_t limit, uint64_t *number) {
    if (!PyLong_Check(value)) {
        PyObject *converted = PyNumber_Index(value);
        if (converted == NULL)
            return -1;
        int failed = read_number(converted, limit, number);
        Py_DECREF(converted);
        return failed;
    }
    unsigned long long read = PyLong_AsUnsignedLongLong(value);
    if (read == (unsigned long long)-1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
    } else if (read <= limit) {
        *number = read;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%S is not in 0..%llu", value, (unsigned long long)limit);
    return -1;
}

/* Whether an int is negative; -1 after an error. */
static int is_negative(PyObject *value) {
    PyObject *number = PyNumber_Index(value);
    if (number == NULL)
        return -1;
    int overflow;
    long long read = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (read == -1 && overflow == 0 && PyErr_Occurred())
        return -1;
    return overflow < 0 || (overflow == 0 && read < 0);
}

/* Reads an int; negative ones become 0, and those over 64 bits UINT64_MAX. */
static int read_bytes_max(PyObject *value, uint64_t *bytes_max) {
    PyObject *number = PyNumber_Index(value);
    if (number == NULL)
        return -1;
    int overflow;
    long long read = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (read == -1 && overflow == 0 && PyErr_Occurred())
        return -1;
    *bytes_max = overflow > 0 ? UINT64_MAX : overflow < 0 || read < 0 ? 0 : (uint64_t)read;
    return 0;
}

/* The bytes of an argument, kept alive until they are released. */
typedef struct {
    fb_bytes bytes;
    int held;
    Py_buffer view;
} source;

static inline int source_open(source *source, PyObject *object) {
    if (PyBytes_CheckExact(object)) {
        source->held = 0;
        source->bytes.data = PyBytes_AsString(object);
        source->bytes.bytes = (size_t)PyBytes_Size(object);
        return 0;
    }
    if (PyObject_GetBuffer(object, &source->view, PyBUF_SIMPLE) < 0)
        return -1;
    source->held = 1;
    source->bytes.data = source->view.buf;
    source->bytes.bytes = (size_t)source->view.len;
    return 0;
}

static inline void source_close(source *source) {
    if (source->held)
        PyBuffer_Release(&source->view);
}

/* Replaces a bytes object with one of another size that starts with the same `kept` bytes: the
   stable ABI cannot resize one in place. `*bytes` is NULL afterwards if memory ran out. */
static int replace_bytes(PyObject **bytes, size_t kept, size_t size) {
    PyObject *other = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (other != NULL && kept > 0)
        memcpy(PyBytes_AsString(other), PyBytes_AsString(*bytes), kept);
    Py_XDECREF(*bytes);
    *bytes = other;
    return other == NULL ? -1 : 0;
}

/* ---- scan ---- */

static PyObject *known_offset(fb_offset offset) {
    if (offset.known)
        return PyLong_FromUnsignedLongLong(offset.value);
    return Py_NewRef(Py_None);
}

static PyObject *column_bytes(const void *items, size_t rows, size_t item_bytes) {
    return PyBytes_FromStringAndSize(items, (Py_ssize_t)(rows * item_bytes));
}

static PyObject *scan_bytes(fb_bytes buffer, size_t start, fb_offset expected, int consecutive) {
    fb_frames frames = {0};
    fb_scan_end end;
    PyThreadState *unlocked = NULL;
    if (buffer.bytes - start >= UNLOCKED_BYTES_MIN)
        unlocked = PyEval_SaveThread();
    bool scanned =
        fb_scan(buffer.data, buffer.bytes, start, expected, consecutive, &frames, &end);
    if (unlocked != NULL)
        PyEval_RestoreThread(unlocked);
    PyObject *result = NULL;
    if (scanned)
        result = Py_BuildValue("NNNniN", column_bytes(frames.offsets, frames.rows, 8),
                               column_bytes(frames.positions, frames.rows, 8),
                               column_bytes(frames.lengths, frames.rows, 4),
                               (Py_ssize_t)end.safe_length, (int)end.end, known_offset(end.offset));
    else
        PyErr_NoMemory();
    fb_frames_free(&frames);
    return result;
}

static int read_expected(PyObject *value, fb_offset *expected) {
    int negative = is_negative(value);
    if (negative < 0)
        return -1;
    *expected = (fb_offset){!negative, 0};
    return negative ? 0 : read_number(value, UINT64_MAX, &expected->value);
}

static PyObject *native_scan(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("scan", count, 4) < 0)
        return NULL;
    source buffer;
    if (source_open(&buffer, args[0]) < 0)
        return NULL;
    PyObject *result = NULL;
    uint64_t start;
    fb_offset expected;
    int consecutive;
    if (read_number(args[1], buffer.bytes.bytes, &start) == 0 &&
        read_expected(args[2], &expected) == 0 && (consecutive = PyObject_IsTrue(args[3])) >= 0)
        result = scan_bytes(buffer.bytes, (size_t)start, expected, consecutive);
    source_close(&buffer);
    return result;
}

/* ---- find ---- */

static PyObject *find_bytes(fb_bytes buffer, const fb_wanted *wanted) {
    fb_frames found = {0};
    size_t resume = 0;
    PyThreadState *unlocked = NULL;
    if (wanted->stop >= UNLOCKED_BYTES_MIN)
        unlocked = PyEval_SaveThread();
    bool done = fb_find(buffer.data, buffer.bytes, wanted, &found, &resume);
    if (unlocked != NULL)
        PyEval_RestoreThread(unlocked);
    PyObject *result = NULL;
    if (done)
        result = Py_BuildValue("NNn", column_bytes(found.offsets, found.rows, 8),
                               column_bytes(found.positions, found.rows, 8), (Py_ssize_t)resume);
    else
        PyErr_NoMemory();
    fb_frames_free(&found);
    return result;
}

static PyObject *native_find_frames(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("find_frames", count, 7) < 0)
        return NULL;
    source buffer;
    if (source_open(&buffer, args[0]) < 0)
        return NULL;
    PyObject *result = NULL;
    uint64_t stop, total, limit;
    fb_wanted wanted;
    int messages_only;
    if (read_number(args[1], buffer.bytes.bytes, &stop) == 0 &&
        read_number(args[2], FB_OFFSET_MAX, &total) == 0 &&
        read_number(args[3], FB_OFFSET_MAX, &wanted.first) == 0 &&
        read_number(args[4], FB_OFFSET_MAX, &wanted.last) == 0 &&
        (messages_only = PyObject_IsTrue(args[5])) >= 0 &&
        read_number(args[6], FB_OFFSET_MAX, &limit) == 0) {
        if (total < buffer.bytes.bytes) {
            PyErr_SetString(PyExc_ValueError, "the file is smaller than the buffer");
        } else {
            wanted.total = total;
            wanted.stop = (size_t)stop;
            wanted.limit = (size_t)limit;
            wanted.messages_only = messages_only;
            result = find_bytes(buffer.bytes, &wanted);
        }
    }
    source_close(&buffer);
    return result;
}

/* ---- columns ---- */

#define COLUMNS 9
static const size_t column_item_bytes[COLUMNS] = {8, 8, 8, 8, 8, 8, 8, 8, 1};

static enum fb_stop locate_rows(fb_bytes buffer, fb_bytes positions, fb_bytes lengths, size_t rows,
                                PyObject **columns, size_t *done) {
    uint8_t *room[COLUMNS];
    for (int column = 0; column < COLUMNS; column++)
        room[column] = (uint8_t *)PyBytes_AsString(columns[column]);
    fb_columns into = {room[0], room[1], room[2], room[3], room[4],
                       room[5], room[6], room[7], room[8]};
    PyThreadState *unlocked = NULL;
    if (rows >= UNLOCKED_ROWS_MIN)
        unlocked = PyEval_SaveThread();
    enum fb_stop stop = fb_locate_rows(buffer.data, buffer.bytes, positions.data, lengths.data,
                                       rows, &into, done);
    if (unlocked != NULL)
        PyEval_RestoreThread(unlocked);
    return stop;
}

static int make_columns(PyObject **columns, size_t rows) {
    for (int column = 0; column < COLUMNS; column++)
        if ((columns[column] = column_bytes(NULL, rows, column_item_bytes[column])) == NULL)
            return -1;
    return 0;
}

static int cut_columns(PyObject **columns, size_t rows) {
    for (int column = 0; column < COLUMNS; column++)
        if (replace_bytes(&columns[column], rows * column_item_bytes[column],
                          rows * column_item_bytes[column]) < 0)
            return -1;
    return 0;
}

static int fill_columns(fb_bytes buffer, fb_bytes positions, fb_bytes lengths, PyObject **columns,
                        Py_ssize_t *bad) {
    size_t rows = positions.bytes / 8, done = 0;
    if (positions.bytes % 8 || lengths.bytes % 4 || lengths.bytes / 4 != rows) {
        PyErr_Format(PyExc_ValueError, "%zu bytes of positions and %zu of lengths do not match",
                     positions.bytes, lengths.bytes);
        return -1;
    }
    if (make_columns(columns, rows) < 0)
        return -1;
    *bad = -1;
    switch (locate_rows(buffer, positions, lengths, rows, columns, &done)) {
    case FB_ALL_ROWS:
        return 0;
    case FB_NO_MESSAGE:
        *bad = (Py_ssize_t)done;
        return cut_columns(columns, done);
    default:
        PyErr_Format(PyExc_ValueError, "message %zu is not inside the buffer of %zu bytes", done,
                     buffer.bytes);
        return -1;
    }
}

static PyObject *columns_of(fb_bytes buffer, fb_bytes positions, fb_bytes lengths) {
    PyObject *columns[COLUMNS] = {NULL};
    Py_ssize_t bad;
    PyObject *result = NULL;
    if (fill_columns(buffer, positions, lengths, columns, &bad) == 0)
        result = Py_BuildValue("OOOOOOOOOn", columns[0], columns[1], columns[2], columns[3],
                               columns[4], columns[5], columns[6], columns[7], columns[8], bad);
    for (int column = 0; column < COLUMNS; column++)
        Py_XDECREF(columns[column]);
    return result;
}

static PyObject *native_columns(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("columns", count, 3) < 0)
        return NULL;
    source sources[3];
    PyObject *result = NULL;
    int opened = 0;
    while (opened < 3 && source_open(&sources[opened], args[opened]) == 0)
        opened++;
    if (opened == 3)
        result = columns_of(sources[0].bytes, sources[1].bytes, sources[2].bytes);
    while (opened > 0)
        source_close(&sources[--opened]);
    return result;
}

/* ---- survey ---- */

static PyObject *survey_bytes(fb_bytes buffer, fb_bytes positions, fb_bytes lengths,
                              fb_bytes topic) {
    size_t rows = positions.bytes / 8;
    if (positions.bytes % 8 || lengths.bytes % 4 || lengths.bytes / 4 != rows) {
        PyErr_Format(PyExc_ValueError, "%zu bytes of positions and %zu of lengths do not match",
                     positions.bytes, lengths.bytes);
        return NULL;
    }
    fb_survey survey;
    PyThreadState *unlocked = NULL;
    if (rows >= UNLOCKED_ROWS_MIN)
        unlocked = PyEval_SaveThread();
    enum fb_stop stop = fb_survey_rows(buffer.data, buffer.bytes, positions.data, lengths.data,
                                       rows, topic.data, topic.bytes, &survey);
    if (unlocked != NULL)
        PyEval_RestoreThread(unlocked);
    if (stop == FB_OUT_OF_RANGE) {
        PyErr_Format(PyExc_ValueError, "message %zu is not inside the buffer of %zu bytes",
                     survey.rows, buffer.bytes);
        return NULL;
    }
    return Py_BuildValue("Knn", (unsigned long long)survey.publish_time,
                         stop == FB_ALL_ROWS ? (Py_ssize_t)-1 : (Py_ssize_t)survey.rows,
                         survey.foreign == survey.rows ? (Py_ssize_t)-1
                                                       : (Py_ssize_t)survey.foreign);
}

static PyObject *native_survey(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("survey", count, 4) < 0)
        return NULL;
    source sources[4];
    PyObject *result = NULL;
    int opened = 0;
    while (opened < 4 && source_open(&sources[opened], args[opened]) == 0)
        opened++;
    if (opened == 4)
        result = survey_bytes(sources[0].bytes, sources[1].bytes, sources[2].bytes,
                              sources[3].bytes);
    while (opened > 0)
        source_close(&sources[--opened]);
    return result;
}

/* ---- gather ---- */

static PyObject *gathered(PyObject *offsets, PyObject *data, PyObject *validity, fb_bytes buffer,
                          fb_bytes positions, fb_bytes lengths, size_t rows) {
    if (offsets == NULL || data == NULL || validity == NULL)
        return NULL;
    fb_gathered out = {(uint8_t *)PyBytes_AsString(data), (size_t)PyBytes_Size(data),
                       (uint8_t *)PyBytes_AsString(offsets),
                       validity == Py_None ? NULL : (uint8_t *)PyBytes_AsString(validity)};
    PyThreadState *unlocked = NULL;
    if (out.bytes >= UNLOCKED_BYTES_MIN)
        unlocked = PyEval_SaveThread();
    bool whole =
        fb_gather(buffer.data, buffer.bytes, positions.data, lengths.data, rows, &out);
    if (unlocked != NULL)
        PyEval_RestoreThread(unlocked);
    if (whole)
        return Py_BuildValue("OOO", offsets, data, validity);
    PyErr_SetString(PyExc_ValueError, "the columns changed while they were read");
    return NULL;
}

static PyObject *gather_bytes(fb_bytes buffer, fb_bytes positions, fb_bytes lengths) {
    size_t rows = positions.bytes / 8, nulls, done;
    uint64_t total;
    if (positions.bytes % 8 || lengths.bytes != positions.bytes) {
        PyErr_Format(PyExc_ValueError, "%zu bytes of positions and %zu of lengths do not match",
                     positions.bytes, lengths.bytes);
        return NULL;
    }
    switch (fb_gather_size(buffer.bytes, positions.data, lengths.data, rows, &total, &nulls,
                           &done)) {
    case FB_ALL_ROWS:
        break;
    case FB_TOO_LARGE:
        PyErr_Format(PyExc_OverflowError, "the first %zu spans are over %llu bytes", done + 1,
                     (unsigned long long)FB_GATHER_BYTES_MAX);
        return NULL;
    default:
        PyErr_Format(PyExc_ValueError, "span %zu is not inside the buffer of %zu bytes", done,
                     buffer.bytes);
        return NULL;
    }
    PyObject *offsets = column_bytes(NULL, rows + 1, 4);
    PyObject *data = column_bytes(NULL, (size_t)total, 1);
    PyObject *validity = nulls ? column_bytes(NULL, (rows + 7) / 8, 1) : Py_NewRef(Py_None);
    PyObject *result = gathered(offsets, data, validity, buffer, positions, lengths, rows);
    Py_XDECREF(offsets);
    Py_XDECREF(data);
    Py_XDECREF(validity);
    return result;
}

static PyObject *native_gather(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("gather", count, 3) < 0)
        return NULL;
    source sources[3];
    PyObject *result = NULL;
    int opened = 0;
    while (opened < 3 && source_open(&sources[opened], args[opened]) == 0)
        opened++;
    if (opened == 3)
        result = gather_bytes(sources[0].bytes, sources[1].bytes, sources[2].bytes);
    while (opened > 0)
        source_close(&sources[--opened]);
    return result;
}

/* ---- ledgers ---- */

static PyObject *native_crc32c(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    source buffer;
    if (check_count("crc32c", count, 1) < 0 || source_open(&buffer, args[0]) < 0)
        return NULL;
    PyThreadState *unlocked = NULL;
    if (buffer.bytes.bytes >= UNLOCKED_BYTES_MIN)
        unlocked = PyEval_SaveThread();
    uint32_t crc = fb_crc32c(buffer.bytes.data, buffer.bytes.bytes);
    if (unlocked != NULL)
        PyEval_RestoreThread(unlocked);
    source_close(&buffer);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *entries_of(fb_bytes buffer, size_t start, uint64_t left, uint64_t entry_id) {
    fb_frames rows = {0};
    size_t stop;
    enum fb_entries_end end;
    PyObject *result = NULL;
    if (fb_scan_entries(buffer.data, buffer.bytes, start, left, entry_id, &rows, &stop, &end))
        result = Py_BuildValue("NNni", column_bytes(rows.positions, rows.rows, 8),
                               column_bytes(rows.lengths, rows.rows, 4), (Py_ssize_t)stop,
                               (int)end);
    else
        PyErr_NoMemory();
    fb_frames_free(&rows);
    return result;
}

static PyObject *native_scan_entries(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    source buffer;
    if (check_count("scan_entries", count, 4) < 0 || source_open(&buffer, args[0]) < 0)
        return NULL;
    PyObject *result = NULL;
    uint64_t start, left, entry_id;
    if (read_number(args[1], buffer.bytes.bytes, &start) == 0 &&
        read_number(args[2], FB_OFFSET_MAX, &left) == 0 &&
        read_number(args[3], FB_OFFSET_MAX, &entry_id) == 0)
        result = entries_of(buffer.bytes, (size_t)start, left, entry_id);
    source_close(&buffer);
    return result;
}

/* A buffer, the u64 positions and u32 lengths of rows in it, and the row to begin with. */
typedef struct {
    source sources[3];
    int opened;
    fb_bytes buffer, positions, lengths;
    size_t rows;
    uint64_t row;
} row_source;

static int rows_open(row_source *from, PyObject *const *args) {
    from->opened = 0;
    while (from->opened < 3 && source_open(&from->sources[from->opened], args[from->opened]) == 0)
        from->opened++;
    if (from->opened < 3)
        return -1;
    from->buffer = from->sources[0].bytes;
    from->positions = from->sources[1].bytes;
    from->lengths = from->sources[2].bytes;
    from->rows = from->positions.bytes / 8;
    if (from->positions.bytes % 8 || from->lengths.bytes % 4 ||
        from->lengths.bytes / 4 != from->rows) {
        PyErr_Format(PyExc_ValueError, "%zu bytes of positions and %zu of lengths do not match",
                     from->positions.bytes, from->lengths.bytes);
        return -1;
    }
    return read_number(args[3], from->rows, &from->row);
}

static void rows_close(row_source *from) {
    while (from->opened > 0)
        source_close(&from->sources[--from->opened]);
}

static PyObject *out_of_range(size_t row, size_t bytes) {
    PyErr_Format(PyExc_ValueError, "row %zu is not inside the buffer of %zu bytes", row, bytes);
    return NULL;
}

static PyObject *changed_meanwhile(void) {
    PyErr_SetString(PyExc_ValueError, "the buffer changed while it was read");
    return NULL;
}

static PyObject *native_check_entries(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("check_entries", count, 4) < 0)
        return NULL;
    row_source from;
    PyObject *result = NULL;
    if (rows_open(&from, args) == 0) {
        size_t row = (size_t)from.row, bad;
        PyThreadState *unlocked = PyEval_SaveThread();
        bool inside = fb_check_entries(
            from.buffer.data, from.buffer.bytes, (const uint8_t *)from.positions.data + 8 * row,
            (const uint8_t *)from.lengths.data + 4 * row, from.rows - row, &bad);
        PyEval_RestoreThread(unlocked);
        result = inside ? PyLong_FromSize_t(row + bad)
                        : out_of_range(row + bad, from.buffer.bytes);
    }
    rows_close(&from);
    return result;
}

/* Copies one entry to `at`, with its header; 0 if it does not fit, and -1 after an error. */
static int pack_entry(PyObject *entry, uint64_t entry_id, Py_buffer *block, size_t *at,
                      uint64_t *needed) {
    source data;
    if (source_open(&data, entry) < 0)
        return -1;
    size_t bytes = data.bytes.bytes, room = (size_t)block->len - *at;
    int fits = bytes <= FB_ENTRY_BYTES_MAX && room >= FB_ENTRY_HEADER_BYTES &&
               bytes <= room - FB_ENTRY_HEADER_BYTES;
    if (fits) {
        uint8_t *to = (uint8_t *)block->buf + *at;
        fb_store_entry_header(to, (uint32_t)bytes, entry_id);
        if (bytes > 0)
            memcpy(to + FB_ENTRY_HEADER_BYTES, data.bytes.data, bytes);
        *at += FB_ENTRY_HEADER_BYTES + bytes;
    } else {
        *needed = bytes;
    }
    source_close(&data);
    return fits;
}

static PyObject *packed_entries(PyObject *entries, uint64_t index, uint64_t entry_id,
                                Py_buffer *block, size_t at) {
    uint64_t needed = 0;
    int fits = 1;
    while (fits > 0) {
        Py_ssize_t count = PyList_Size(entries); /* again: reading an entry may run Python code */
        if (count < 0)
            return NULL;
        if (index >= (uint64_t)count)
            break;
        PyObject *entry = Py_NewRef(PyList_GetItem(entries, (Py_ssize_t)index));
        fits = pack_entry(entry, entry_id, block, &at, &needed);
        Py_DECREF(entry);
        if (fits > 0) {
            index++;
            entry_id++;
        }
    }
    if (fits < 0)
        return NULL;
    return Py_BuildValue("KnK", (unsigned long long)index, (Py_ssize_t)at,
                         (unsigned long long)needed);
}

static PyObject *native_pack_entries(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("pack_entries", count, 5) < 0)
        return NULL;
    if (!PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "the entries are no list");
        return NULL;
    }
    PyObject *result = NULL;
    uint64_t index, entry_id, at;
    uint64_t most = FB_OFFSET_MAX - (uint64_t)PyList_Size(args[0]);
    Py_buffer block;
    if (read_number(args[1], (uint64_t)PyList_Size(args[0]), &index) == 0 &&
        read_number(args[2], most, &entry_id) == 0 &&
        PyObject_GetBuffer(args[3], &block, PyBUF_WRITABLE) == 0) {
        if (read_number(args[4], (uint64_t)block.len, &at) == 0)
            result = packed_entries(args[0], index, entry_id, &block, (size_t)at);
        PyBuffer_Release(&block);
    }
    return result;
}

static PyObject *packed_rows(const row_source *from, uint64_t offset, uint64_t entry_id,
                             Py_buffer *block, uint64_t start) {
    size_t rows = from->rows - (size_t)from->row, done, at = (size_t)start;
    PyObject *places = column_bytes(NULL, rows, 8);
    if (places == NULL)
        return NULL;
    uint64_t needed;
    PyThreadState *unlocked = PyEval_SaveThread();
    enum fb_stop stop =
        fb_pack_frames(from->buffer.data, from->buffer.bytes, from->positions.data,
                       from->lengths.data, from->rows, (size_t)from->row, offset, entry_id,
                       block->buf, (size_t)block->len, &at,
                       (uint8_t *)PyBytes_AsString(places), &done, &needed);
    PyEval_RestoreThread(unlocked);
    PyObject *result = NULL;
    size_t packed = (done - (size_t)from->row) * 8;
    if (stop == FB_OUT_OF_RANGE)
        out_of_range(done, from->buffer.bytes);
    else if (stop != FB_ALL_ROWS)
        changed_meanwhile();
    else if (packed == rows * 8 || replace_bytes(&places, packed, packed) == 0)
        result = Py_BuildValue("nnOK", (Py_ssize_t)done, (Py_ssize_t)at, places,
                               (unsigned long long)needed);
    Py_XDECREF(places);
    return result;
}

static int read_consecutive(PyObject *value, const row_source *from, uint64_t *number) {
    return read_number(value, FB_OFFSET_MAX - (from->rows - from->row), number);
}

static PyObject *native_pack_frames(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("pack_frames", count, 8) < 0)
        return NULL;
    row_source from;
    PyObject *result = NULL;
    uint64_t offset, entry_id, at;
    Py_buffer block;
    if (rows_open(&from, args) == 0 && read_consecutive(args[4], &from, &offset) == 0 &&
        read_consecutive(args[5], &from, &entry_id) == 0 &&
        PyObject_GetBuffer(args[6], &block, PyBUF_WRITABLE) == 0) {
        if (read_number(args[7], (uint64_t)block.len, &at) == 0)
            result = packed_rows(&from, offset, entry_id, &block, at);
        PyBuffer_Release(&block);
    }
    rows_close(&from);
    return result;
}

static PyObject *unpacked_rows(const row_source *from, uint64_t offset, uint64_t total,
                               size_t done, enum fb_entry_fault fault) {
    size_t rows = done - (size_t)from->row;
    PyObject *frames = column_bytes(NULL, (size_t)total, 1);
    PyObject *positions = column_bytes(NULL, rows, 8), *lengths = column_bytes(NULL, rows, 4);
    PyObject *result = NULL;
    if (frames != NULL && positions != NULL && lengths != NULL) {
        PyThreadState *unlocked = PyEval_SaveThread();
        bool same = fb_unpack_frames(
            from->buffer.data, from->buffer.bytes, from->positions.data, from->lengths.data,
            (size_t)from->row, done, offset, (uint8_t *)PyBytes_AsString(frames), (size_t)total,
            (uint8_t *)PyBytes_AsString(positions), (uint8_t *)PyBytes_AsString(lengths));
        PyEval_RestoreThread(unlocked);
        if (same)
            result = Py_BuildValue("OOOni", frames, positions, lengths, (Py_ssize_t)done,
                                   (int)fault);
        else
            changed_meanwhile();
    }
    Py_XDECREF(frames);
    Py_XDECREF(positions);
    Py_XDECREF(lengths);
    return result;
}

static PyObject *native_unpack_frames(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("unpack_frames", count, 6) < 0)
        return NULL;
    row_source from;
    PyObject *result = NULL;
    uint64_t offset, bytes_max, total;
    if (rows_open(&from, args) == 0 && read_consecutive(args[4], &from, &offset) == 0 &&
        read_number(args[5], FB_OFFSET_MAX, &bytes_max) == 0) {
        size_t done;
        enum fb_entry_fault fault;
        PyThreadState *unlocked = PyEval_SaveThread();
        enum fb_stop stop = fb_unpack_size(
            from.buffer.data, from.buffer.bytes, from.positions.data, from.lengths.data, from.rows,
            (size_t)from.row, bytes_max, &total, &done, &fault);
        PyEval_RestoreThread(unlocked);
        result = stop == FB_ALL_ROWS ? unpacked_rows(&from, offset, total, done, fault)
                                     : out_of_range(done, from.buffer.bytes);
    }
    rows_close(&from);
    return result;
}

/* ---- the parts of a message ---- */

/* The texts of the attributes; they point into str objects that `owner` or the caller keeps. */
typedef struct {
    fb_bytes *items;
    size_t capacity;
    PyObject *owner;
    fb_bytes few[FEW_TEXTS];
} text_list;

static inline void texts_open(text_list *texts) {
    texts->items = texts->few;
    texts->capacity = FEW_TEXTS;
    texts->owner = NULL;
}

static inline void texts_close(text_list *texts) {
    Py_CLEAR(texts->owner);
    if (texts->items != texts->few)
        PyMem_Free(texts->items);
}

static int texts_reserve(text_list *texts, size_t count) {
    if (count <= texts->capacity)
        return 0;
    fb_bytes *items = PyMem_Malloc(count * sizeof *items);
    if (items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (texts->items != texts->few)
        PyMem_Free(texts->items);
    texts->items = items;
    texts->capacity = count;
    return 0;
}

static int read_text(PyObject *value, fb_bytes *text) {
    if (!PyUnicode_Check(value)) {
        PyErr_Format(PyExc_TypeError, "text is a str, not %R", (PyObject *)Py_TYPE(value));
        return -1;
    }
    Py_ssize_t bytes;
    text->data = PyUnicode_AsUTF8AndSize(value, &bytes);
    text->bytes = (size_t)bytes;
    return text->data == NULL ? -1 : 0;
}

static int check_attribute_count(PyObject *module, Py_ssize_t count) {
    if (count <= FB_ATTRIBUTES_MAX)
        return 0;
    module_state *state = PyModule_GetState(module);
    PyErr_Format(state->message_too_large, "%zd attributes; at most %d", count, FB_ATTRIBUTES_MAX);
    return -1;
}

/* Runs no Python code, so the dict does not change until the message is written. */
static int gather_dict(PyObject *module, PyObject *attributes, text_list *texts, size_t *count) {
    Py_ssize_t pairs = PyDict_Size(attributes), at = 0;
    if (check_attribute_count(module, pairs) < 0 || texts_reserve(texts, 2 * (size_t)pairs) < 0)
        return -1;
    fb_bytes *text = texts->items;
    PyObject *key, *value;
    for (; PyDict_Next(attributes, &at, &key, &value); text += 2)
        if (read_text(key, &text[0]) < 0 || read_text(value, &text[1]) < 0)
            return -1;
    *count = (size_t)pairs;
    return 0;
}

/* The pair at `index` of a list of items, as a tuple that the list owns. */
static PyObject *pair_at(PyObject *items, Py_ssize_t index) {
    PyObject *item = PyList_GetItem(items, index);
    if (item == NULL || (PyTuple_CheckExact(item) && PyTuple_Size(item) == 2))
        return item;
    PyObject *pair = PySequence_Tuple(item);
    if (pair == NULL)
        return NULL;
    if (PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_ValueError, "an item of %zd values; a pair has 2", PyTuple_Size(pair));
        Py_DECREF(pair);
        return NULL;
    }
    return PyList_SetItem(items, index, pair) < 0 ? NULL : pair;
}

static int gather_mapping(PyObject *module, PyObject *attributes, text_list *texts, size_t *count) {
    int given = PyObject_IsTrue(attributes);
    *count = 0;
    if (given <= 0)
        return given;
    PyObject *items = texts->owner = PyMapping_Items(attributes);
    if (items == NULL)
        return -1;
    Py_ssize_t pairs = PyList_Size(items);
    if (check_attribute_count(module, pairs) < 0 || texts_reserve(texts, 2 * (size_t)pairs) < 0)
        return -1;
    fb_bytes *text = texts->items;
    for (Py_ssize_t index = 0; index < pairs; index++, text += 2) {
        PyObject *pair = pair_at(items, index);
        if (pair == NULL || read_text(PyTuple_GetItem(pair, 0), &text[0]) < 0 ||
            read_text(PyTuple_GetItem(pair, 1), &text[1]) < 0)
            return -1;
    }
    *count = (size_t)pairs;
    return 0;
}

/* Fills in the attributes and the routing key; returns the size of the message, or -1 after an
   error. The message is valid until Python code runs again. */
static int64_t complete_message(PyObject *module, fb_message *message, PyObject *attributes,
                                PyObject *routing_key, text_list *texts) {
    message->attribute_count = 0;
    if (attributes != Py_None) {
        int failed = PyDict_CheckExact(attributes)
                         ? gather_dict(module, attributes, texts, &message->attribute_count)
                         : gather_mapping(module, attributes, texts, &message->attribute_count);
        if (failed < 0)
            return -1;
    }
    message->texts = texts->items;
    message->has_routing_key = routing_key != Py_None;
    if (message->has_routing_key && read_text(routing_key, &message->routing_key) < 0)
        return -1;
    uint64_t bytes = fb_message_bytes(message);
    if (bytes > FB_MESSAGE_BYTES_MAX) {
        module_state *state = PyModule_GetState(module);
        PyErr_Format(state->message_too_large, "a message of %llu bytes; at most %u",
                     (unsigned long long)bytes, FB_MESSAGE_BYTES_MAX);
        return -1;
    }
    return (int64_t)bytes;
}

/* ---- append_one ---- */

/* A run: the number of its frames, its length in bytes with this prefix, then the frames. */
#define RUN_PREFIX_BYTES 16u

typedef struct {
    uint64_t frames;
    uint64_t bytes;
} run_prefix;

static int read_prefix(PyObject *run, run_prefix *prefix) {
    if (!PyByteArray_Check(run)) {
        PyErr_Format(PyExc_TypeError, "a run is a bytearray, not %R", (PyObject *)Py_TYPE(run));
        return -1;
    }
    size_t bytes = (size_t)PyByteArray_Size(run);
    const uint8_t *data = (const uint8_t *)PyByteArray_AsString(run);
    if (bytes >= RUN_PREFIX_BYTES) {
        prefix->frames = fb_load_u64(data);
        prefix->bytes = fb_load_u64(data + 8);
        if (prefix->bytes >= RUN_PREFIX_BYTES && prefix->bytes <= bytes)
            return 0;
    }
    PyErr_SetString(PyExc_ValueError, "the bytearray is no run of frames");
    return -1;
}

/* Adds one frame to the run and counts it; no other code can run in between. */
static int run_append(PyObject *run, run_prefix prefix, const fb_message *message, uint32_t bytes) {
    size_t size = (size_t)prefix.bytes + FB_HEADER_BYTES + bytes;
    if (size > (size_t)PY_SSIZE_T_MAX) {
        PyErr_NoMemory();
        return -1;
    }
    if (PyByteArray_Resize(run, (Py_ssize_t)size) < 0)
        return -1;
    uint8_t *data = (uint8_t *)PyByteArray_AsString(run);
    fb_encode(message, bytes, data + prefix.bytes);
    fb_store_u64(data, prefix.frames + 1);
    fb_store_u64(data + 8, size);
    return 0;
}

/* Collecting the attributes may run Python code, so the run is checked again after that. */
static int append_to_run(PyObject *module, PyObject *run, uint64_t frames, fb_message *message,
                         PyObject *attributes, PyObject *routing_key) {
    text_list texts;
    texts_open(&texts);
    int failed = -1;
    run_prefix prefix;
    int64_t bytes = complete_message(module, message, attributes, routing_key, &texts);
    if (bytes >= 0 && read_prefix(run, &prefix) == 0) {
        if (prefix.frames == frames)
            failed = run_append(run, prefix, message, (uint32_t)bytes);
        else
            PyErr_SetString(PyExc_ValueError, "the run changed while a frame was encoded");
    }
    texts_close(&texts);
    return failed;
}

static PyObject *append_held(PyObject *module, PyObject *const *args, uint64_t frames,
                             fb_message *message) {
    source payload, head, middle;
    int failed = -1;
    if (source_open(&payload, args[4]) < 0)
        return NULL;
    if (source_open(&head, args[2]) == 0) {
        if (source_open(&middle, args[3]) == 0) {
            message->payload = payload.bytes;
            message->head = head.bytes;
            message->middle = middle.bytes;
            failed = append_to_run(module, args[0], frames, message, args[6], args[7]);
            source_close(&middle);
        }
        source_close(&head);
    }
    source_close(&payload);
    return failed < 0 ? NULL : PyLong_FromUnsignedLongLong(message->offset);
}

static PyObject *native_append_one(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    fb_message message;
    run_prefix prefix;
    uint64_t first;
    if (check_count("append_one", count, 8) < 0 || read_prefix(args[0], &prefix) < 0 ||
        read_number(args[1], FB_OFFSET_MAX, &first) < 0)
        return NULL;
    if (prefix.frames > FB_OFFSET_MAX - first) {
        PyErr_SetString(PyExc_ValueError, "no offset is left");
        return NULL;
    }
    message.numbered = false;
    message.offset = first + prefix.frames;
    if (read_number(args[5], UINT64_MAX, &message.publish_time) < 0)
        return NULL;
    return append_held(module, args, prefix.frames, &message);
}

/* ---- encode_many ---- */

static inline Py_ssize_t items_in(PyObject *sequence) {
    return PyList_CheckExact(sequence) ? PyList_Size(sequence) : PySequence_Size(sequence);
}

/* A new reference to an item, or to None if there is no sequence. */
static inline PyObject *item_at(PyObject *sequence, Py_ssize_t index) {
    if (sequence == Py_None)
        return Py_NewRef(Py_None);
    if (PyList_CheckExact(sequence))
        return Py_XNewRef(PyList_GetItem(sequence, index));
    if (PyTuple_CheckExact(sequence))
        return Py_XNewRef(PyTuple_GetItem(sequence, index));
    return PySequence_GetItem(sequence, index);
}

/* The frames encoded so far, in a bytes object with room for more. */
typedef struct {
    PyObject *bytes;
    uint8_t *at;
    size_t used;
    size_t room;
} output;

/* Makes room for one more frame; the first call allocates `likely` bytes in advance. */
static int output_reserve(output *out, size_t frame, uint64_t likely) {
    if (frame <= out->room - out->used)
        return 0;
    size_t room = out->used + frame;
    if (room > (size_t)PY_SSIZE_T_MAX / 2) {
        PyErr_NoMemory();
        return -1;
    }
    if (room < 2 * out->room)
        room = 2 * out->room;
    if (out->used == 0 && room < likely && likely <= (size_t)PY_SSIZE_T_MAX / 2)
        room = (size_t)likely;
    if (replace_bytes(&out->bytes, out->used, room) < 0)
        return -1;
    out->at = (uint8_t *)PyBytes_AsString(out->bytes);
    out->room = room;
    return 0;
}

/* The state of one call of encode_many. */
typedef struct {
    PyObject *module;
    PyObject *payloads;
    PyObject *attributes;
    PyObject *routing_keys;
    uint64_t bytes_max;
    Py_ssize_t index;
    uint64_t likely; /* the size of all frames together, or less */
    fb_message message; /* head, middle and publish time for all; offset and number of the next */
    bool exhausted;     /* whether the last message had the highest number */
    text_list texts;
    output out;
} batch;

/* Encodes one more frame; returns 1, or 0 if it does not fit, or -1 after an error. */
static int encode_held(batch *batch, PyObject *payload, PyObject *attributes, PyObject *key) {
    if (batch->message.offset > FB_OFFSET_MAX) {
        PyErr_Format(PyExc_ValueError, "%llu is not in 0..%llu",
                     (unsigned long long)batch->message.offset, (unsigned long long)FB_OFFSET_MAX);
        return -1;
    }
    if (batch->exhausted) {
        PyErr_SetString(PyExc_ValueError, "no request id is left");
        return -1;
    }
    source source;
    if (source_open(&source, payload) < 0)
        return -1;
    batch->message.payload = source.bytes;
    int64_t bytes =
        complete_message(batch->module, &batch->message, attributes, key, &batch->texts);
    output *out = &batch->out;
    size_t frame = FB_HEADER_BYTES + (size_t)bytes;
    int added = bytes < 0 ? -1 : 1;
    if (added > 0 && out->used > 0 &&
        (out->used > batch->bytes_max || frame > batch->bytes_max - out->used))
        added = 0;
    if (added > 0 && output_reserve(out, frame, batch->likely) < 0)
        added = -1;
    if (added > 0) {
        fb_encode(&batch->message, (uint32_t)bytes, out->at + out->used);
        out->used += frame;
    }
    Py_CLEAR(batch->texts.owner);
    source_close(&source);
    return added;
}

static int encode_next(batch *batch) {
    int added = -1;
    PyObject *payload = item_at(batch->payloads, batch->index), *attributes = NULL, *key = NULL;
    if (payload != NULL && (attributes = item_at(batch->attributes, batch->index)) != NULL &&
        (key = item_at(batch->routing_keys, batch->index)) != NULL)
        added = encode_held(batch, payload, attributes, key);
    Py_XDECREF(payload);
    Py_XDECREF(attributes);
    Py_XDECREF(key);
    return added;
}

/* Whether a message can be measured without running Python code. */
static inline bool is_plain(PyObject *payload, PyObject *attributes, PyObject *key) {
    return (PyBytes_CheckExact(payload) || PyByteArray_CheckExact(payload) ||
            PyMemoryView_Check(payload)) &&
           (attributes == Py_None || PyDict_CheckExact(attributes)) &&
           (key == Py_None || PyUnicode_CheckExact(key));
}

/* A borrowed item of a list or a tuple, None if there is no sequence, otherwise NULL. */
static inline PyObject *plain_item(PyObject *sequence, Py_ssize_t index) {
    if (sequence == Py_None)
        return sequence;
    if (PyList_CheckExact(sequence))
        return index < PyList_Size(sequence) ? PyList_GetItem(sequence, index) : NULL;
    if (PyTuple_CheckExact(sequence))
        return index < PyTuple_Size(sequence) ? PyTuple_GetItem(sequence, index) : NULL;
    return NULL;
}

/* The size of the frame of a plain message; 0 if it is not plain or not valid. */
static size_t plain_frame_bytes(batch *batch, Py_ssize_t index) {
    PyObject *payload = plain_item(batch->payloads, index);
    PyObject *attributes = plain_item(batch->attributes, index);
    PyObject *key = plain_item(batch->routing_keys, index);
    source source;
    if (payload == NULL || attributes == NULL || key == NULL ||
        !is_plain(payload, attributes, key) || source_open(&source, payload) < 0) {
        PyErr_Clear();
        return 0;
    }
    batch->message.payload = source.bytes;
    int64_t bytes =
        complete_message(batch->module, &batch->message, attributes, key, &batch->texts);
    source_close(&source);
    if (bytes >= 0)
        return FB_HEADER_BYTES + (size_t)bytes;
    PyErr_Clear();
    return 0;
}

/* Estimates the size of the batch. New memory costs more than looking at the messages twice, so it
   is allocated once; nothing relies on the estimate. */
static uint64_t likely_bytes(batch *batch) {
    uint64_t likely = 0;
    for (Py_ssize_t index = batch->index;; index++) {
        size_t frame = plain_frame_bytes(batch, index);
        if (frame == 0 || likely > batch->bytes_max || frame > batch->bytes_max - likely)
            return likely;
        likely += frame;
    }
}

/* Encodes until the payloads end or one does not fit. The length is read again for each message,
   because a list may change meanwhile. */
static int encode_all(batch *batch) {
    for (;;) {
        Py_ssize_t count = items_in(batch->payloads);
        if (count < 0)
            return -1;
        if (batch->index >= count)
            return 0;
        int added = encode_next(batch);
        if (added <= 0)
            return added;
        batch->exhausted = batch->message.numbered && batch->message.request_id == UINT64_MAX;
        batch->message.request_id++;
        batch->message.offset++;
        batch->index++;
    }
}

static PyObject *batch_result(batch *batch) {
    output *out = &batch->out;
    if ((out->bytes == NULL || out->used < out->room) &&
        replace_bytes(&out->bytes, out->used, out->used) < 0)
        return NULL;
    return Py_BuildValue("On", out->bytes, batch->index);
}

static int read_batch(batch *batch, PyObject *const *args) {
    Py_ssize_t count = items_in(batch->payloads);
    uint64_t index;
    if (count < 0 || read_number(args[4], (uint64_t)count, &index) < 0 ||
        read_number(args[2], FB_OFFSET_MAX, &batch->message.offset) < 0 ||
        read_number(args[5], UINT64_MAX, &batch->message.publish_time) < 0)
        return -1;
    batch->index = (Py_ssize_t)index;
    batch->exhausted = false;
    batch->message.request_id = 0;
    batch->message.numbered = args[9] != Py_None;
    if (batch->message.numbered &&
        read_number(args[9], UINT64_MAX, &batch->message.request_id) < 0)
        return -1;
    return read_bytes_max(args[8], &batch->bytes_max);
}

static PyObject *encode_batch(batch *batch) {
    PyObject *result = NULL;
    texts_open(&batch->texts);
    batch->out = (output){NULL, NULL, 0, 0};
    batch->likely = likely_bytes(batch);
    if (encode_all(batch) == 0)
        result = batch_result(batch);
    Py_XDECREF(batch->out.bytes);
    texts_close(&batch->texts);
    return result;
}

static PyObject *native_encode_many(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("encode_many", count, 10) < 0)
        return NULL;
    batch batch;
    batch.module = module;
    batch.payloads = args[3];
    batch.attributes = args[6];
    batch.routing_keys = args[7];
    if (read_batch(&batch, args) < 0)
        return NULL;
    source head, middle;
    PyObject *result = NULL;
    if (source_open(&head, args[0]) < 0)
        return NULL;
    if (source_open(&middle, args[1]) == 0) {
        batch.message.head = head.bytes;
        batch.message.middle = middle.bytes;
        if (batch.message.numbered && head.bytes.bytes < FB_REQUEST_BYTES)
            PyErr_SetString(PyExc_ValueError, "the head has no room for a request id");
        else
            result = encode_batch(&batch);
        source_close(&middle);
    }
    source_close(&head);
    return result;
}

/* ---- entries of Pulsar ---- */

static PyObject *entry_columns_of(fb_bytes buffer, fb_bytes positions, fb_bytes lengths) {
    size_t rows = positions.bytes / 8, done = 0;
    if (positions.bytes % 8 || lengths.bytes % 4 || lengths.bytes / 4 != rows) {
        PyErr_Format(PyExc_ValueError, "%zu bytes of positions and %zu of lengths do not match",
                     positions.bytes, lengths.bytes);
        return NULL;
    }
    int64_t *columns = malloc((rows ? rows : 1) * FB_ENTRY_COLUMNS * sizeof *columns);
    if (columns == NULL)
        return PyErr_NoMemory();
    fb_properties properties = {NULL, 0, 0};
    PyThreadState *unlocked = PyEval_SaveThread();
    enum fb_entry_stop stop = fb_entry_columns(buffer.data, buffer.bytes, positions.data,
                                               lengths.data, rows, columns, &properties, &done);
    PyEval_RestoreThread(unlocked);
    PyObject *result = NULL;
    if (stop == FB_ENTRIES_ALL)
        result = Py_BuildValue("NN", column_bytes(columns, rows * FB_ENTRY_COLUMNS, 8),
                               column_bytes(properties.numbers, properties.count, 8));
    else if (stop == FB_ENTRIES_MEMORY)
        PyErr_NoMemory();
    else
        PyErr_Format(PyExc_ValueError, "entry %zu is not inside the buffer of %zu bytes", done,
                     buffer.bytes);
    free(columns);
    free(properties.numbers);
    return result;
}

static PyObject *native_entry_columns(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("entry_columns", count, 3) < 0)
        return NULL;
    source sources[3];
    PyObject *result = NULL;
    int opened = 0;
    while (opened < 3 && source_open(&sources[opened], args[opened]) == 0)
        opened++;
    if (opened == 3)
        result = entry_columns_of(sources[0].bytes, sources[1].bytes, sources[2].bytes);
    while (opened > 0)
        source_close(&sources[--opened]);
    return result;
}

/* The number of messages in all batches: as many as their bytes can hold, or SIZE_MAX. */
static size_t batch_rows(fb_bytes lengths, fb_bytes counts) {
    size_t rows = 0;
    for (size_t at = 0; at < counts.bytes; at += 4) {
        uint32_t length, count;
        memcpy(&length, (const uint8_t *)lengths.data + at, 4);
        memcpy(&count, (const uint8_t *)counts.data + at, 4);
        if (count > length / FB_BATCH_MESSAGE_BYTES_MIN)
            return SIZE_MAX;
        rows += count;
    }
    return rows;
}

static PyObject *batch_columns_of(const fb_bytes *given) {
    size_t entries = given[1].bytes / 8, done;
    if (given[1].bytes % 8 || given[2].bytes % 4 || given[2].bytes / 4 != entries ||
        given[3].bytes != given[2].bytes) {
        PyErr_Format(PyExc_ValueError, "%zu bytes of positions, %zu of lengths and %zu of counts do "
                                       "not match",
                     given[1].bytes, given[2].bytes, given[3].bytes);
        return NULL;
    }
    size_t rows = batch_rows(given[2], given[3]);
    if (rows == SIZE_MAX)
        return Py_NewRef(Py_None);
    int64_t *columns = malloc((rows ? rows : 1) * FB_ENTRY_COLUMNS * sizeof *columns);
    if (columns == NULL)
        return PyErr_NoMemory();
    fb_properties properties = {NULL, 0, 0};
    PyThreadState *unlocked = PyEval_SaveThread();
    enum fb_entry_stop stop =
        fb_batch_columns(given[0].data, given[0].bytes, given[1].data, given[2].data, given[3].data,
                         entries, rows, columns, &properties, &done);
    PyEval_RestoreThread(unlocked);
    PyObject *result = NULL;
    if (stop == FB_ENTRIES_ALL)
        result = Py_BuildValue("NN", column_bytes(columns, rows * FB_ENTRY_COLUMNS, 8),
                               column_bytes(properties.numbers, properties.count, 8));
    else if (stop == FB_ENTRIES_MEMORY)
        PyErr_NoMemory();
    else
        result = Py_NewRef(Py_None);
    free(columns);
    free(properties.numbers);
    return result;
}

static PyObject *native_batch_columns(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (check_count("batch_columns", count, 4) < 0)
        return NULL;
    source sources[4];
    fb_bytes given[4];
    PyObject *result = NULL;
    int opened = 0;
    while (opened < 4 && source_open(&sources[opened], args[opened]) == 0) {
        given[opened] = sources[opened].bytes;
        opened++;
    }
    if (opened == 4)
        result = batch_columns_of(given);
    while (opened > 0)
        source_close(&sources[--opened]);
    return result;
}

/* ---- the module ---- */

#define FUNCTION(name, doc)                                                                        \
    {#name, (PyCFunction)(void (*)(void))native_##name, METH_FASTCALL, doc}

static PyMethodDef functions[] = {
    FUNCTION(scan, "scan(buffer, start, expected, consecutive, /)\n--\n\n"
                   "See forebay.format.pure.scan; the columns are bytes."),
    FUNCTION(find_frames, "find_frames(buffer, stop, total, first, last, messages_only, "
                          "limit, /)\n--\n\n"
                          "See forebay.format.pure.find_frames; the columns are bytes."),
    FUNCTION(columns, "columns(buffer, positions, lengths, /)\n--\n\n"
                      "See forebay.format.pure.columns; the columns are bytes."),
    FUNCTION(survey, "survey(buffer, positions, lengths, topic, /)\n--\n\n"
                     "See forebay.format.pure.survey."),
    FUNCTION(gather, "gather(buffer, positions, lengths, /)\n--\n\n"
                     "See forebay.format.pure.gather."),
    FUNCTION(crc32c, "crc32c(data, /)\n--\n\nSee forebay.format.pulsar.pure.crc32c."),
    FUNCTION(scan_entries, "scan_entries(buffer, start, left, entry_id, /)\n--\n\n"
                           "See forebay.format.pulsar.pure.scan_entries; the columns are bytes."),
    FUNCTION(check_entries, "check_entries(buffer, positions, lengths, row, /)\n--\n\n"
                            "See forebay.format.pulsar.pure.check_entries."),
    FUNCTION(pack_entries, "pack_entries(entries, index, entry_id, block, at, /)\n--\n\n"
                           "See forebay.format.pulsar.pure.pack_entries."),
    FUNCTION(pack_frames, "pack_frames(buffer, positions, lengths, row, offset, entry_id, block, "
                          "at, /)\n--\n\n"
                          "See forebay.format.pulsar.pure.pack_frames; the column is bytes."),
    FUNCTION(unpack_frames, "unpack_frames(buffer, positions, lengths, row, offset, bytes_max, "
                            "/)\n--\n\n"
                            "See forebay.format.pulsar.pure.unpack_frames; the columns are bytes."),
    FUNCTION(append_one, "append_one(run, first_offset, head, middle, payload, publish_time, "
                         "attributes, routing_key, /)\n--\n\nSee forebay.format.pure.append_one."),
    FUNCTION(encode_many, "encode_many(head, middle, offset, payloads, index, publish_time, "
                          "attributes, routing_keys, bytes_max, request_id, /)\n--\n\n"
                          "See forebay.format.pure.encode_many."),
    FUNCTION(entry_columns, "entry_columns(buffer, positions, lengths, /)\n--\n\n"
                            "See forebay.format.pulsar.columns."),
    FUNCTION(batch_columns, "batch_columns(buffer, positions, lengths, counts, /)\n--\n\n"
                            "See forebay.format.pulsar.columns."),
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    fb_init();
    fb_ledger_init();
    PyObject *errors = PyImport_ImportModule("forebay.errors");
    if (errors == NULL)
        return -1;
    module_state *state = PyModule_GetState(module);
    state->message_too_large = PyObject_GetAttrString(errors, "MessageTooLarge");
    Py_DECREF(errors);
    return state->message_too_large == NULL ? -1 : 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    module_state *state = PyModule_GetState(module);
    if (state != NULL)
        Py_VISIT(state->message_too_large);
    return 0;
}

static int module_clear(PyObject *module) {
    module_state *state = PyModule_GetState(module);
    if (state != NULL)
        Py_CLEAR(state->message_too_large);
    return 0;
}

static void module_free(void *module) { module_clear(module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "forebay.format._native",
    .m_doc = "The compiled twin of forebay.format.pure.",
    .m_size = sizeof(module_state),
    .m_methods = functions,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
