select completed is not null, token is ?2, expires <= cast(unixepoch('subsec') * 1000 as integer), fingerprint, generation,
  lease_ends - cast(unixepoch('subsec') * 1000 as integer), record, expires - cast(unixepoch('subsec') * 1000 as integer), token
from "tower_idempotency" where id = ?1
