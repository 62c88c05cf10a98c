//! The final state of all processes, and the check of its consistency.

use std::{collections::BTreeMap, fmt, fs};

use axum::http::StatusCode;
use tower_idempotency_sqlx::sqlx;

use super::riders::Rider;
use crate::processes::Processes;

pub(super) struct Totals {
    /// The rides of each rider, with their states.
    rides: BTreeMap<String, Vec<Ride>>,
    /// The number of charges of each card, without the declined ones.
    charges: BTreeMap<String, usize>,
    /// The number of receipts of each ride.
    receipts: BTreeMap<i64, usize>,
    /// The number of deliveries of each ride.
    deliveries: BTreeMap<i64, usize>,
}

struct Ride {
    id: i64,
    state: String,
}

/// A violation of the expected state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// A rider does not have exactly one ride.
    Rides,
    /// A ride is not finished.
    Stuck,
    /// A ride does not have exactly one charge, or a declined card was charged.
    Charges,
    /// A charged ride does not have exactly one receipt.
    Receipts,
    /// A receipt was never delivered.
    Deliveries,
    /// A response contradicts the outcome or an earlier response.
    Answers,
}

impl Totals {
    pub(super) async fn open(processes: &Processes) -> Self {
        let mut rides: BTreeMap<String, Vec<Ride>> = BTreeMap::new();
        let rows = sqlx::query_as("select rider, id, state from rides");
        let rows: Vec<(String, i64, String)> =
            rows.fetch_all(&processes.pool).await.expect("rides");
        for (rider, id, state) in rows {
            rides.entry(rider).or_default().push(Ride { id, state });
        }
        let rows = sqlx::query_scalar("select ride from receipts");
        let receipts = rows.fetch_all(&processes.pool).await.expect("receipts");
        let charges = processes.charges().await;
        let charged = charges.into_iter().filter(|charge| !charge.declined);
        // The file is missing before the first delivery.
        let mailbox = fs::read_to_string(&processes.mailbox).unwrap_or_default();
        Self {
            rides,
            charges: count(charged.map(|charge| charge.card)),
            receipts: count(receipts),
            deliveries: count(mailbox.lines().map(|line| {
                let ride = line.split(' ').nth(1).expect("a whole line");
                ride.parse().expect("a number")
            })),
        }
    }

    /// Returns the number of riders that gave up and have a ride nevertheless.
    pub(super) fn finished_for(&self, riders: &[Rider]) -> usize {
        let gave_up = riders.iter().filter(|rider| rider.gave_up);
        gave_up
            .filter(|rider| self.rides.contains_key(&rider.name()))
            .count()
    }

    pub(super) fn judge(&self, riders: &[Rider]) -> Vec<(Wrong, String)> {
        let mut wrong = Vec::new();
        for rider in riders {
            let name = rider.name();
            let mut expect = |kind, what: &str, expected: usize, found: usize| {
                if found != expected {
                    wrong.push((kind, format!("{name} has {found} {what}, not {expected}")));
                }
            };
            let booked = usize::from(!rider.is_declined());
            let rides = self.rides.get(&name).map_or(&[][..], Vec::as_slice);
            expect(Wrong::Rides, "rides", 1, rides.len());
            let end = ["declined", "booked"][booked];
            let ended = rides.iter().filter(|ride| ride.state == end).count();
            expect(Wrong::Stuck, "rides at their end", rides.len(), ended);
            let charges = self.charges.get(&rider.card());
            let charges = charges.copied().unwrap_or_default();
            expect(Wrong::Charges, "charges", booked, charges);
            let of_rides = |counted: &BTreeMap<i64, usize>| -> usize {
                let counts = rides.iter().filter_map(|ride| counted.get(&ride.id));
                counts.sum()
            };
            let receipts = of_rides(&self.receipts);
            expect(Wrong::Receipts, "receipts", booked, receipts);
            let delivered = of_rides(&self.deliveries).min(receipts);
            expect(Wrong::Deliveries, "receipts delivered", receipts, delivered);

            let status = [StatusCode::PAYMENT_REQUIRED, StatusCode::CREATED][booked];
            for (response, n) in rider.responses.iter().zip(0..) {
                let is_first = response.body == rider.responses[0].body;
                if response.status != status || !is_first || n > 0 && !response.is_replay() {
                    wrong.push((
                        Wrong::Answers,
                        format!("{name} received {:?}", rider.responses),
                    ));
                }
            }
        }
        wrong
    }
}

fn count<T: Ord>(things: impl IntoIterator<Item = T>) -> BTreeMap<T, usize> {
    let mut counts = BTreeMap::new();
    for thing in things {
        *counts.entry(thing).or_default() += 1;
    }
    counts
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rides: usize = self.rides.values().map(Vec::len).sum();
        let charges: usize = self.charges.values().sum();
        let receipts: usize = self.receipts.values().sum();
        let deliveries: usize = self.deliveries.values().sum();
        write!(
            f,
            "{rides} rides of {} riders, {charges} charges to {} cards, {receipts} receipts for {} rides, \
             {deliveries} deliveries",
            self.rides.len(),
            self.charges.len(),
            self.receipts.len(),
        )
    }
}
