"""The schema, as the steps that lead to it. A released step is never changed; the next one is added."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE leases (lease_id TEXT PRIMARY KEY, fence INTEGER NOT NULL, record TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE tickets (request_id TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE ended (lease_id TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE observations (number INTEGER PRIMARY KEY, model_digest TEXT NOT NULL, engine_build TEXT "
        "NOT NULL, shape TEXT NOT NULL, record TEXT NOT NULL)",
        "CREATE INDEX observations_by_launch ON observations (model_digest, engine_build, shape, number)",
    ),
)
