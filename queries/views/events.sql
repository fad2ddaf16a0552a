-- events: what happened to the recorder itself.
--
-- Columns:
--   time_ns  BIGINT   ns  When it was noticed.
--   layer    VARCHAR  -   timeline, exact, samples, ranges, device_state or recorder.
--   kind     VARCHAR  -   loss, failure, pause, odd_record or note.
--   message  VARCHAR  -   One sentence: what, and what would fix it.
--   count    BIGINT   -   How many records or launches it concerns.
--   process  VARCHAR  -   Which process wrote the row.
SELECT
    time_ns, layer, kind, message, count, process
FROM raw.events
