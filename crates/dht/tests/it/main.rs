//! The block layer on simulated rings. A failing run prints its seed; the same seed
//! replays it.

mod acknowledged;
mod attribution;
mod caching;
mod claims;
mod clocks;
mod coming_back;
mod denier;
mod diversion;
mod dripping;
mod dropping;
mod durability;
mod eviction;
mod false_holders;
mod false_roots;
mod figures;
mod flawed;
mod full;
mod hedged_writes;
mod hedging;
mod hostile;
mod idle;
mod kinds;
mod leases;
mod losses;
mod malicious;
mod many_servers;
mod massive_failure;
mod patience;
mod perfect;
mod quotas;
mod renewing;
mod ring;
mod soak;
mod static_ring;
mod virtual_servers;
