-- Returns the lowest and the highest score in a band of an index, for a kind of members: 'live' or 'expired' leases, 'live' for
-- completed entries, or 'any' for records that need attention. The margin is the number of milliseconds on either side of the
-- present time.
local function range(number, kind, now, margin)
  local min, max = number * BAND, (number + 1) * BAND - 1
  if kind == 'live' then
    min = min + math.max(now - margin, 0)
  elseif kind == 'expired' then
    max = min + now + margin
  end
  return min, max
end
