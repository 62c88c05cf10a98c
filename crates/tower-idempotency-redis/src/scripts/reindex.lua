-- Puts an entry in the index of its state, and removes it from the others. KEYS: entry, index of leases, index of records that
-- need attention. ARGV: id. Returns 1 if an index has it, else 0.
local kind = redis.call('TYPE', KEYS[1]).ok
local entry = kind == 'hash' and redis.call('HMGET', KEYS[1], 's', 'l', 'c', 'b') or {}
if entry[1] == 'L' and entry[2] then
  redis.call('ZADD', KEYS[2], entry[2], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
  return 1
end
redis.call('ZREM', KEYS[2], ARGV[1])
if entry[1] == 'D' and string.sub(entry[4] or '', 1, 2) == '\1\2' then
  redis.call('ZADD', KEYS[3], entry[3] or 0, ARGV[1])
  return 1
end
redis.call('ZREM', KEYS[3], ARGV[1])
return 0
