-- Extends the lease. KEYS: entry, and index of leases unless there is none. ARGV: token, lease in ms, id. Returns 1, or 0 if the
-- token does not hold the entry, or -1 if a newer version wrote it or it is damaged.
local entry = redis.call('HMGET', KEYS[1], 's', 't', 'k')
if not entry[1] and (entry[2] or entry[3]) or entry[1] and entry[1] ~= 'L' and entry[1] ~= 'D' then
  return -1
end
if entry[1] ~= 'L' or entry[2] ~= ARGV[1] then
  return 0
end
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
-- The write that needs no memory comes first. When memory is full, a script that has written continues; others do not begin.
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', ends + entry[3]))
redis.call('HSET', KEYS[1], 'l', string.format('%.0f', ends))
if KEYS[2] then
  redis.pcall('ZADD', KEYS[2], score(ends, entry[3]), ARGV[3])
end
return 1
