# curl with its own retries, and a key of the caller: curl.sh URL
set -eu

order() {
    out=$(curl --silent --retry 100 --retry-all-errors --retry-delay 1 --retry-max-time 60 --fail-with-body \
        --header "Idempotency-Key: $2" --data "amount=$1" --write-out '\n%{http_code}' "$url/v1/payment_intents") || true
    id=$(printf '%s' "$out" | sed -n 's/.*"id":"\([^"]*\)".*/\1/p')
    printf '{"status":%s,"body":"%s"}\n' "$(printf '%s' "$out" | tail -n 1)" "$id"
}

# A reused key is final. curl would retry any error.
once() {
    out=$(curl --silent --header "Idempotency-Key: $2" --data "amount=$1" --output /dev/null --write-out '%{http_code}' \
        "$url/v1/payment_intents")
    printf '{"status":%s,"body":""}\n' "$out"
}

url=$1
order 7 "$(cat /proc/sys/kernel/random/uuid)"
order 8 "$(cat /proc/sys/kernel/random/uuid)"
order 9 order-9
once 10 order-9
