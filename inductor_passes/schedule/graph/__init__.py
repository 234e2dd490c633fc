"""Between an FX graph and a schedule problem: extract, apply, and the promises that are checked after."""
