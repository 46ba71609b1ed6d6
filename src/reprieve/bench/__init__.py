"""Arms measured side by side: runs, results, reports."""
