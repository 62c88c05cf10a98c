-- Reads members of an index from a position on, and writes nothing. KEYS: index.
-- ARGV: the leases to read: 'live', 'expired', or 'any' for records that need attention; milliseconds that are added to either side
-- of the present time; score of the position; number of members with this score to skip; largest number of members.
-- Returns members and scores, alternating.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {}
end
local time = redis.call('TIME')
local now, margin, from = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[2]), tonumber(ARGV[3])
local skip, count, found = tonumber(ARGV[4]), tonumber(ARGV[5]), {}
for number = 0, band(math.huge) do
  local min, max = number * BAND, (number + 1) * BAND - 1
  if ARGV[1] == 'live' then
    min = min + math.max(now - margin, 0)
  elseif ARGV[1] == 'expired' then
    max = min + now + margin
  end
  if max >= from and count > 0 then
    local offset = 0
    if min <= from then
      min, offset = from, skip
    end
    local part = redis.call('ZRANGEBYSCORE', KEYS[1], string.format('%.0f', min), string.format('%.0f', max),
      'WITHSCORES', 'LIMIT', offset, count)
    for _, value in ipairs(part) do
      found[#found + 1] = value
    end
    count = count - #part / 2
  end
end
return found
