select completed is not null, token is ?2, expires <= cast(unixepoch('subsec') * 1000 as integer), token is null
from "tower_idempotency" where id = ?1
