"""Lets Spark find the format `forebay` by its name, with nothing imported."""
