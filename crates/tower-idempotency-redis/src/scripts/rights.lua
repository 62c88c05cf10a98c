-- Tries commands whose failure neither an acquire nor a release of a new key reports, and changes nothing.
-- KEYS: an entry that does not exist; with indexes, those of leases and of records that need attention; then that of completed
-- entries, if the store has it. ARGV: id.
-- Returns the names of the commands that fail. While a slot is moved, the script gets no indexes, and tries no command on them.
local index, id, failed = KEYS[4], ARGV[1], {}
local function try(name, ...)
  local reply = redis.pcall(name, ...)
  if type(reply) == 'table' and reply.err then
    failed[#failed + 1] = string.lower(name)
  end
end
-- A completion needs HDEL and PEXPIRE, and a replay needs PTTL. The index of completed entries needs PTTL and PEXPIRE.
try('HDEL', KEYS[1], 'l')
try('PTTL', KEYS[1])
try('PEXPIRE', KEYS[1], 1)
if index then
  -- No member has such a score.
  try('ZRANGEBYSCORE', index, '-inf', '(-inf', 'LIMIT', 0, 1)
  -- XX adds no member.
  try('ZADD', index, 'XX', 0, id)
  try('ZREM', index, id)
end
return failed
