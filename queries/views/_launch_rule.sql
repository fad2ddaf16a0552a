-- _launch_rule: what Nsight Compute's speed-of-light rule says of each launch of a kernel class, where it says
-- the same of all of them. Only for runs imported from Nsight Compute, which judges launches and no means.
--
-- Columns:
--   kernel_class_id  BIGINT   -  Which kernel with which shape.
--   label            VARCHAR  -  memory, compute, latency or balanced.
WITH limits AS (
    SELECT
        max(CASE WHEN name = 'high_pct' THEN value END) AS high_pct,
        max(CASE WHEN name = 'low_pct' THEN value END) AS low_pct,
        max(CASE WHEN name = 'lead_pct' THEN value END) AS lead_pct
    FROM raw.settings
),
launches AS (
    SELECT
        e.kernel_class_id,
        max(CASE WHEN m.counter = 'compute_pct' THEN e.value END) AS compute,
        max(CASE WHEN m.counter = 'memory_pct' THEN e.value END) AS memory
    FROM exact AS e
    JOIN counter_metrics AS m ON m.metric = e.metric AND m.counter IN ('compute_pct', 'memory_pct')
    JOIN run AS r ON r.source = 'ncu'
    WHERE e.scope = 'kernel' AND e.kernel_class_id IS NOT NULL AND e.value BETWEEN 0 AND 1e30
    GROUP BY e.kernel_class_id, e.process, e.correlation_id
),
labelled AS (
    SELECT
        s.kernel_class_id,
        CASE
            WHEN s.compute >= l.high_pct OR s.memory >= l.high_pct
                THEN CASE WHEN s.memory > s.compute THEN 'memory' ELSE 'compute' END
            WHEN s.compute < l.low_pct AND s.memory < l.low_pct THEN 'latency'
            WHEN s.compute - s.memory >= l.lead_pct THEN 'compute'
            WHEN s.memory - s.compute >= l.lead_pct THEN 'memory'
            ELSE 'balanced'
        END AS label
    FROM launches AS s
    CROSS JOIN limits AS l
    WHERE s.compute IS NOT NULL AND s.memory IS NOT NULL
)
SELECT kernel_class_id, min(label) AS label
FROM labelled
GROUP BY kernel_class_id
HAVING min(label) = max(label)
