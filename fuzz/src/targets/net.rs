//! What arrives on a connection before anybody knows what it means.

use atoll_key::PeerId;
use atoll_net::frame::{self, Frame, Head};
use atoll_net::hello::{self, Binding, Hello, Role, SPOKEN, Secret, Verdict};
use atoll_net::{Refusal, Reply, Request};
use bytes::Bytes;

use super::{Target, target};

pub(super) fn targets() -> Vec<Target> {
    vec![
        target("net/frame", frames(), |input| {
            let Ok(frame) = frame::decode(Bytes::copy_from_slice(input)) else { return false };
            assert_eq!(frame.encode()[..], *input, "a frame has one encoding");
            true
        }),
        target("net/frame-head", frames(), |input| {
            input.first_chunk().is_some_and(|head| {
                Head::decode(head).is_ok_and(|head| {
                    assert!(head.body_bytes() <= frame::MAX_BODY_BYTES, "a body beyond the limit");
                    true
                })
            })
        }),
        target("net/hello", hellos(), |input| {
            let _ = hello::verify(input, Role::Listener, &binding());
            let Ok(hello) = hello::decode(input) else { return false };
            let again = hello::verify(&hello.encode(&binding()), hello.role, &binding());
            assert_eq!(again, Ok((hello, Secret::Current)), "it does not survive being encoded");
            true
        }),
    ]
}

fn frames() -> Vec<Vec<u8>> {
    let parts = vec![Bytes::from_static(b"one"), Bytes::new(), Bytes::from_static(&[3; 50])];
    let header = Bytes::from_static(b"header");
    let request = Request { method: 0x0201, header: header.clone(), parts: parts.clone() };
    let bare = Request { method: 1, header: Bytes::new(), parts: Vec::new() };
    let frames = [
        Frame::Request(7, request),
        Frame::Request(8, bare),
        Frame::Reply(7, Reply { header, parts }),
        Frame::Refusal(7, Refusal::new(Refusal::MALFORMED, "warum nicht? Größe")),
        Frame::Cancel(9),
        Frame::Ping(1),
        Frame::Pong(1),
        Frame::GoAway,
    ];
    frames.into_iter().map(|frame| frame.encode().to_vec()).collect()
}

fn binding() -> Binding {
    Binding::new(&[1; 32].into(), &[2; 32], PeerId([3; 32]), PeerId([4; 32]))
}

fn hellos() -> Vec<Vec<u8>> {
    let hello = |role, verdict, addr: &str| Hello {
        role,
        verdict,
        versions: SPOKEN,
        addr: addr.parse().expect("an address"),
        profile: [5; 32],
    };
    let hellos = [
        hello(Role::Dialler, Verdict::Welcome, "192.0.2.7:4000"),
        hello(Role::Listener, Verdict::OtherProfile, "[2001:db8::1]:9"),
        hello(Role::Listener, Verdict::NoCommonVersion, "0.0.0.0:0"),
    ];
    hellos.iter().map(|hello| hello.encode(&binding()).to_vec()).collect()
}
