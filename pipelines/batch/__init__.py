"""Jobs of many rows: rows -> requests -> the scheduler -> results, which a journal keeps until all are there."""
