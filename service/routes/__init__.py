"""The routes of the API, by dialect. Each module declares its routes in `ROUTES`."""
