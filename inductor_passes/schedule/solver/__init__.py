"""From a problem to a schedule: candidates by many rules, searched, priced, bounded. No torch."""
