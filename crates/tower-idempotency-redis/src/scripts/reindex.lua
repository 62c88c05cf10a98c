-- Puts an entry in the index of its state, and removes it from the other. KEYS: entry, index of leases, index of records that
-- need attention. ARGV: id. An entry that a newer version wrote stays where it is.
-- Returns {added, removed, skipped}: the members that an index did not have, those that it should not have had, and 1 if the
-- script got no indexes, as while a slot is moved.
if not KEYS[2] then
  return {0, 0, 1}
end
local kind = redis.call('TYPE', KEYS[1]).ok
local entry = kind == 'hash' and redis.call('HMGET', KEYS[1], 's', 'l', 'c', 'b', 'k') or {}
local added, removed = 0, 0
if entry[1] == 'L' then
  -- A damaged time is the first.
  added = redis.call('ZADD', KEYS[2], score(tonumber(entry[2] or 0) or 0, entry[5]), ARGV[1])
  return {added, redis.call('ZREM', KEYS[3], ARGV[1]), 0}
end
local needs_attention = entry[1] == 'D' and string.sub(entry[4] or '', 1, 2) == '\1\2'
if kind ~= 'none' and entry[1] ~= 'D' then
  return {0, 0, 0}
end
removed = redis.call('ZREM', KEYS[2], ARGV[1])
if needs_attention then
  added = redis.call('ZADD', KEYS[3], tonumber(entry[3] or 0) and entry[3] or 0, ARGV[1])
else
  removed = removed + redis.call('ZREM', KEYS[3], ARGV[1])
end
return {added, removed, 0}
