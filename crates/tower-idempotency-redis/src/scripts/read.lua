-- Reads entries for an operator, and writes nothing. KEYS: entries. ARGV: the number of bytes of a record to return, -1 for all;
-- the length of the longest record to read, -1 for any.
-- Returns for each nil if there is none, {0} if the key has another type, or the fields s, t, f, g, l, c, o, p, the record, its
-- length, the ms left (-1 if it never expires), and the time in ms. A record that is not read is nil, and has its length.
-- Returns fewer entries than keys if their records are long, and at least one.
--
-- The server copies a whole record to read its beginning. Meanwhile it serves no other client.
local MOST_READ = 1048576
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local longest, bytes_read = tonumber(ARGV[2]), 0
-- Returns the length of a record that is too long to read. A user without rights to the command reads every record.
local function length_if_long(key)
  local length = longest >= 0 and redis.pcall('HSTRLEN', key, 'b')
  return type(length) == 'number' and length > longest and length
end
local function read(key)
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then
    return false
  end
  if kind ~= 'hash' then
    return {0}
  end
  local length = length_if_long(key)
  -- No entry has a field without a name.
  local entry = redis.call('HMGET', key, 's', 't', 'f', 'g', 'l', 'c', 'o', 'p', length and '' or 'b')
  local record = entry[9]
  if record then
    length = string.len(record)
    bytes_read = bytes_read + length
    if ARGV[1] ~= '-1' then
      entry[9] = string.sub(record, 1, tonumber(ARGV[1]))
    end
  end
  entry[10] = length
  entry[11] = redis.call('PTTL', key)
  entry[12] = now
  return entry
end
local entries = {}
for number, key in ipairs(KEYS) do
  entries[number] = read(key)
  if bytes_read > MOST_READ then
    break
  end
end
return entries
