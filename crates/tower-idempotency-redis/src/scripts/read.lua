-- Reads entries for an operator, and writes nothing. KEYS: entries. ARGV: the number of bytes of a record to return, -1 for all.
-- Returns for each nil if there is none, {0} if the key has another type, or the fields s, t, f, g, l, c, o, p, the record, its
-- length, the ms left (-1 if it never expires), and the time in ms.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local function read(key)
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then
    return false
  end
  if kind ~= 'hash' then
    return {0}
  end
  local entry = redis.call('HMGET', key, 's', 't', 'f', 'g', 'l', 'c', 'o', 'p', 'b')
  local record = entry[9]
  if record then
    entry[10] = string.len(record)
    if ARGV[1] ~= '-1' then
      entry[9] = string.sub(record, 1, tonumber(ARGV[1]))
    end
  else
    entry[10] = false
  end
  entry[11] = redis.call('PTTL', key)
  entry[12] = now
  return entry
end
local entries = {}
for number, key in ipairs(KEYS) do
  entries[number] = read(key)
end
return entries
