-- Compare and set, all or nothing: replaces the values only if each is what the writer last saw.
-- KEYS[i] keys. ARGV[1] time to live, milliseconds. Then three arguments for each key: the expected value (empty for an
-- absent one), the new value, and '1' if the expected value could not be read. Such a value is kept under
-- KEYS[i] .. ':aside'.
-- Returns {1} when the values were replaced; otherwise {0, value, value, ...}, the present ones (empty for absent).
local answer = {0}
local is_same = true
for i, key in ipairs(KEYS) do
  local current = redis.call('GET', key) or ''
  answer[#answer + 1] = current
  if current ~= ARGV[3 * i - 1] then
    is_same = false
  end
end
if not is_same then
  return answer
end
for i, key in ipairs(KEYS) do
  if ARGV[3 * i + 1] == '1' then
    redis.call('SET', key .. ':aside', ARGV[3 * i - 1], 'PX', ARGV[1])
  end
  redis.call('SET', key, ARGV[3 * i], 'PX', ARGV[1])
end
return {1}
