"""The Spark sink: `df.write.format("forebay")` and `df.writeStream.format("forebay")`."""
