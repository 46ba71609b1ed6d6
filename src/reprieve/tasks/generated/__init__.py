"""Generator of the bundled tasks' word problems."""
