"""The routes for the upkeep of topics without rights on the object store."""
