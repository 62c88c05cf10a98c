-- Tries each command that the index of completed entries needs, and changes nothing. KEYS: an entry that does not exist, and
-- indexes of leases, of records that need attention, and of completed entries. ARGV: id.
-- Returns the names of the commands that fail. While a slot is moved, the script gets no indexes, and tries no command.
local index, id, failed = KEYS[4], ARGV[1], {}
local function try(name, ...)
  local reply = redis.pcall(name, ...)
  if type(reply) == 'table' and reply.err then
    failed[#failed + 1] = string.lower(name)
  end
end
if index then
  -- No member has such a score.
  try('ZRANGEBYSCORE', index, '-inf', '(-inf', 'LIMIT', 0, 1)
  -- XX adds no member.
  try('ZADD', index, 'XX', 0, id)
  try('ZREM', index, id)
  try('PTTL', index)
  try('PEXPIRE', KEYS[1], 1)
end
return failed
