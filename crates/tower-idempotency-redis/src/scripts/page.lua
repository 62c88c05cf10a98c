-- Reads members of an index from a position on, and writes nothing. KEYS: index.
-- ARGV: the kind of members to read, as in ranges.lua; milliseconds that are added to either side of the present time; score and
-- id of the position; largest number of members.
-- Returns the members after the position and their scores, alternating. There are no more if it returns fewer than requested.
-- Leaves out members with a fractional score, which another program has added: the score of a position is a whole number.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {}
end
local time = redis.call('TIME')
local now, margin, from, id = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local count, found = tonumber(ARGV[5]), {}
-- Compares bytes: the operators of Lua compare by the locale of the server.
local function is_after(member)
  for number = 1, math.min(#member, #id) do
    local one, other = string.byte(member, number), string.byte(id, number)
    if one ~= other then
      return one > other
    end
  end
  return #member > #id
end
for number = 0, band(math.huge) do
  local min, max = range(number, ARGV[1], now, margin)
  local offset, is_last = 0, max < from
  min = math.max(min, from)
  while not is_last and #found < 2 * count do
    local part = redis.call('ZRANGEBYSCORE', KEYS[1], string.format('%.0f', min), string.format('%.0f', max),
      'WITHSCORES', 'LIMIT', offset, count)
    for place = 1, #part, 2 do
      local at = tonumber(part[place + 1])
      local is_listed = at % 1 == 0 and (at > from or is_after(part[place]))
      if is_listed and #found < 2 * count then
        found[#found + 1] = part[place]
        found[#found + 1] = part[place + 1]
      end
    end
    offset, is_last = offset + count, #part < 2 * count
  end
end
return found
