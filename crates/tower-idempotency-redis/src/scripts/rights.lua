-- Tries commands whose failure neither an acquire nor a release of a new key reports, and changes nothing.
-- KEYS: an entry that does not exist; with indexes, those of leases and of records that need attention; then that of completed
-- entries, if the store has it. ARGV: id.
-- Returns the names of the commands that fail. While a slot is moved, the script gets no indexes, and tries no command on them.
local id, failed, has_failed = ARGV[1], {}, {}
local function try(name, ...)
  local reply = redis.pcall(name, ...)
  if type(reply) == 'table' and reply.err and not has_failed[name] then
    has_failed[name] = true
    failed[#failed + 1] = string.lower(name)
  end
end
-- A completion needs HDEL and PEXPIRE, and a replay needs PTTL. The index of completed entries needs PTTL and PEXPIRE.
try('HDEL', KEYS[1], 'l')
try('PTTL', KEYS[1])
try('PEXPIRE', KEYS[1], 1)
for number = 2, #KEYS do
  -- XX adds no member. If the right to remove members is missing, the check has left one, and INCR keeps its score.
  try('ZADD', KEYS[number], 'XX', 'INCR', 0, id)
  try('ZREM', KEYS[number], id)
end
-- No member has such a score.
if KEYS[2] then
  try('ZREMRANGEBYSCORE', KEYS[2], '-inf', '(-inf')
end
if KEYS[4] then
  try('ZRANGEBYSCORE', KEYS[4], '-inf', '(-inf', 'LIMIT', 0, 1)
end
return failed
