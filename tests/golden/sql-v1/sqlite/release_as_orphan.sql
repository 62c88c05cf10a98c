update "tower_idempotency" set token = null, lease_ends = cast(unixepoch('subsec') * 1000 as integer), expires = cast(unixepoch('subsec') * 1000 as integer) + orphan_retention
where id = ?1 and token = ?2 and completed is null and expires > cast(unixepoch('subsec') * 1000 as integer) and (generation > 1 or checkpoint is not null) returning 1
