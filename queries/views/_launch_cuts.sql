-- _launch_cuts: the instants between which launches are added up: see _launch_segments.
--
-- Columns:
--   process  VARCHAR  -   Which process.
--   at_ns    BIGINT   ns  When a range opens or closes, a clock is read, or its reading is older than 5 s.
SELECT process, start_ns AS at_ns
FROM _range_segments
UNION
SELECT process, time_ns
FROM device_state
WHERE sm_clock_hz > 0 AND time_ns BETWEEN 0 AND 4000000000000000000
UNION
SELECT process, time_ns + 5000000001
FROM device_state
WHERE sm_clock_hz > 0 AND time_ns BETWEEN 0 AND 4000000000000000000
