//! The messages of `proto/payments.proto`.

/// A payment to make.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PayRequest {
    /// The account that pays.
    #[prost(string, tag = "1")]
    pub account: String,
    /// The amount in cents.
    #[prost(uint64, tag = "2")]
    pub amount: u64,
}

/// A payment that was made.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Payment {
    /// The number of the payment, starting at 1.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The amount in cents.
    #[prost(uint64, tag = "2")]
    pub amount: u64,
}

/// An account to query.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BalanceRequest {
    /// The account.
    #[prost(string, tag = "1")]
    pub account: String,
}

/// The money in an account.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Balance {
    /// The amount in cents.
    #[prost(uint64, tag = "1")]
    pub amount: u64,
}
