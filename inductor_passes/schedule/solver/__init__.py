"""From a problem to a schedule: drafts by many rules, searched, judged, bounded. No torch."""
