-- Reads an entry for an operator, and writes nothing. ARGV: the number of bytes of the record to return, -1 for all.
-- Returns nil if there is none, {0} if the key has another type, or the fields s, t, f, g, l, c, o, p, the record, its length,
-- the ms left (-1 if it never expires), and the time in ms.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then
  return false
end
if kind ~= 'hash' then
  return {0}
end
local entry = redis.call('HMGET', KEYS[1], 's', 't', 'f', 'g', 'l', 'c', 'o', 'p', 'b')
local record = entry[9]
if record then
  entry[10] = string.len(record)
  if ARGV[1] ~= '-1' then
    entry[9] = string.sub(record, 1, tonumber(ARGV[1]))
  end
else
  entry[10] = false
end
local time = redis.call('TIME')
entry[11] = redis.call('PTTL', KEYS[1])
entry[12] = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
return entry
