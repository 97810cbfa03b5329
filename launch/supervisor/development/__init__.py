"""What needs a checkout of the sources: building, testing, bundling."""
