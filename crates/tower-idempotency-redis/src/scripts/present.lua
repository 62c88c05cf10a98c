-- Finds the indexes that have members of a kind, and writes nothing. KEYS: the first index, whose node runs the script.
-- ARGV: the kind of members to find, and the milliseconds that are added to either side of the present time, as in ranges.lua;
-- indexes.
-- Returns a string with a digit for each: 1 if it has such a member, 0 if not, and 2 if it is on another node.
local time = redis.call('TIME')
local now, margin = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[2])
local function has_member(index)
  for number = 0, band(math.huge) do
    local min, max = range(number, ARGV[1], now, margin)
    local lowest, highest = string.format('%.0f', min), string.format('%.0f', max)
    if redis.call('ZRANGEBYSCORE', index, lowest, highest, 'LIMIT', 0, 1)[1] then
      return 1
    end
  end
  return 0
end
local found = {}
for place = 3, #ARGV do
  local reply = redis.pcall('EXISTS', ARGV[place])
  if type(reply) ~= 'number' then
    reply = 2
  elseif reply == 1 then
    reply = has_member(ARGV[place])
  end
  found[place - 2] = reply
end
return table.concat(found)
