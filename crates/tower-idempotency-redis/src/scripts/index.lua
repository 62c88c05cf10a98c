-- Scores of leases in their index. A score has a band, for the orphan retention, and then the expiry of the lease. Each band
-- has a longest retention, so that one command removes all members whose entries have expired. Members of a former version have
-- no band: their scores are below the first one.
local BAND = 17592186044416
-- Returns the number of the band of a retention, and the longest retention of the band. The last band has none.
local function band(retention)
  retention = tonumber(retention) or 0
  if retention <= 3600000 then
    return 1, 3600000
  end
  if retention <= 172800000 then
    return 2, 172800000
  end
  if retention <= 5529600000 then
    return 3, 5529600000
  end
  return 4
end
local function score(ends, retention)
  return string.format('%.0f', band(retention) * BAND + ends)
end
