"""Times that steps of the job took, and the machine that they show: both count before any formula."""
