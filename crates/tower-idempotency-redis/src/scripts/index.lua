-- Scores of leases in their index. A band of scores is for orphan retentions up to a number of milliseconds, so that one command
-- removes the members whose entries have expired. Within a band the order is that of the expiry of the lease. Members of a
-- former version have no band: their scores are below the first one.
local BAND = 17592186044416
-- Returns the number of the band of a retention, and the longest retention of the band. The last band has none.
local function band(keep)
  keep = tonumber(keep) or 0
  if keep <= 3600000 then
    return 1, 3600000
  end
  if keep <= 172800000 then
    return 2, 172800000
  end
  if keep <= 5529600000 then
    return 3, 5529600000
  end
  return 4
end
local function score(ends, keep)
  return string.format('%.0f', band(keep) * BAND + ends)
end
