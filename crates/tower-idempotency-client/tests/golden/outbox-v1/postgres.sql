-- Table and rows that version 0.1 writes: of an entry that was stored in advance and resumed, and of a call. Never changed.
create table idempotency_outbox (
    position bigint generated always as identity primary key,
    key text not null unique,
    method text not null,
    url text not null,
    headers text not null,
    body bytea not null,
    first_sent bigint,
    provider bigint,
    resumed boolean not null default false
);
insert into idempotency_outbox (key, method, url, headers, body, first_sent, provider, resumed) values ('order-1', 'POST', 'https://api.example.com/orders?x=1', '[["content-type","text/plain"],["x-tenant-id","café"]]', '\x6f6e65200020657370726573736f', 1700000000456, 7, true);
insert into idempotency_outbox (key, method, url, headers, body, first_sent, provider, resumed) values ('order "2"', 'POST', 'https://api.example.com/orders?x=1', '[["content-type","text/plain"],["x-tenant-id","café"],["idempotency-key","\"order \\\"2\\\"\"","key"]]', '\x6f6e65200020657370726573736f', 1700000000123, -4, false);
