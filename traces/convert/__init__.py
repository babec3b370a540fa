"""Turn routing records of other tools into traces."""
