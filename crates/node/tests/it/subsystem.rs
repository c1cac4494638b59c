//! Subsystems that are made outside the crate.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_node::{
    Calls, ClientError, MakeSubsystem, Node, NodeParts, StartError, Status, StatusPart, StatusRow,
    Subsystem,
};
use bytes::Bytes;
use serde_json::json;

use crate::world::{Home, LONG, code_of, until};

/// What peers call a toy by.
const HELLO: u16 = 0x7f01;
/// The control call that has a toy greet the nearest peer.
const GREET: u16 = 0x0381;
/// The control call that answers its request, in capitals.
const SHOUT: u16 = 0x0382;

type Diary = Arc<Mutex<Vec<String>>>;

/// A subsystem that greets others.
struct Toy {
    name: &'static str,
    node: NodeParts,
    /// Whom it greets.
    peer: Option<Peer>,
    diary: Diary,
    refuses: bool,
}

/// What peers say to a toy.
struct Greeted(Diary);

impl Service for Greeted {
    fn handle(&self, _: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        self.0.lock().expect("no panic").push("greeted".into());
        let reply = Reply { header: request.header, parts: Vec::new() };
        Box::pin(async { Ok(reply) })
    }
}

impl Toy {
    fn note(&self, what: &str) {
        self.diary.lock().expect("no panic").push(format!("{} {what}", self.name));
    }

    /// What the peer replies.
    async fn greet(&self, words: Bytes) -> Result<Bytes, String> {
        let peer = self.peer.ok_or("there is nobody")?;
        let request = Request { method: HELLO, header: words, parts: Vec::new() };
        let reply = self.node.transport.call(peer, request, LONG).await;
        reply.map(|reply| reply.header).map_err(|error| error.to_string())
    }
}

impl Subsystem for Toy {
    fn service(self: Arc<Self>) -> Option<(u8, Arc<dyn Service>)> {
        let greeted: Arc<dyn Service> = Arc::new(Greeted(self.diary.clone()));
        (self.name == "one").then_some(((HELLO >> 8) as u8, greeted))
    }

    fn control_calls(self: Arc<Self>, calls: &mut Calls) {
        if self.name != "one" {
            return;
        }
        let mut calls = calls.range(0x0380..=0x0383);
        calls.on(GREET, 16, move |words| {
            let toy = self.clone();
            Box::pin(async move { toy.greet(words).await })
        });
        calls.on(SHOUT, 16, |words| Box::pin(async move { Ok(words.to_ascii_uppercase().into()) }));
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        Box::pin(async move {
            if self.refuses {
                return Err(StartError::Config("toys are out".into()));
            }
            self.note("starts");
            let toy = self.clone();
            self.node.env.spawn(Box::pin(async move {
                toy.note("works");
                std::future::pending::<()>().await;
            }));
            Ok(())
        })
    }

    fn report(&self, status: &mut Status) {
        let text = format!("in {}", self.node.dir.display());
        let rows = vec![StatusRow { name: "toy".into(), text }];
        status.parts.insert(self.name.into(), StatusPart { rows, json: json!({ "wheels": 4 }) });
    }

    fn stop(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let said = self.greet(Bytes::from_static(b"bye")).await.is_ok();
            self.note(if said { "stops with a word" } else { "stops" });
        })
    }
}

fn toy(name: &'static str, peer: Option<Peer>, diary: &Diary) -> MakeSubsystem {
    let diary = diary.clone();
    Arc::new(move |node| Arc::new(Toy { name, node, peer, diary: diary.clone(), refuses: false }))
}

fn written(diary: &Diary) -> Vec<String> {
    std::mem::take(&mut *diary.lock().expect("no panic"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subsystem_from_outside_takes_part_in_the_life_of_a_node() {
    let (host, guest) = (Home::new(), Home::new());
    let (theirs, ours) = (Diary::default(), Diary::default());
    let config = host.config(None);
    let other = Node::start_with(config, &[toy("one", None, &theirs)]).await.expect("starts");
    let config = guest.config(Some(code_of(&host).await));
    let toys = [toy("one", Some(other.local()), &ours), toy("two", Some(other.local()), &ours)];
    let node = Node::start_with(config, &toys).await.expect("starts");
    let starts = |diary: &[String]| -> Vec<String> {
        diary.iter().filter(|line| line.ends_with("starts")).cloned().collect()
    };
    until("both work", || {
        let diary = ours.lock().expect("no panic");
        ["one works", "two works"].iter().all(|line| diary.iter().any(|written| written == line))
    })
    .await;
    assert_eq!(starts(&written(&ours)), ["one starts", "two starts"]);

    let client = guest.client().await;
    let call = async |number, words: &'static [u8]| {
        client.outside_call(number, Bytes::from_static(words)).await
    };
    assert_eq!(call(SHOUT, b"hello").await.expect("shouts"), "HELLO");
    assert!(!written(&theirs).contains(&"greeted".to_owned()));
    assert_eq!(call(GREET, b"hello").await.expect("greets"), "hello");
    assert!(written(&theirs).contains(&"greeted".to_owned()));
    for (number, words) in [(SHOUT, &b"seventeen letters"[..]), (GREET - 1, b"?"), (0x03ff, b"?")] {
        let refused = call(number, words).await.expect_err("there is no such call");
        assert!(matches!(refused, ClientError::Refused { .. }), "{number:#06x}: {refused}");
    }
    let alone = host.client().await;
    let told = alone.outside_call(GREET, Bytes::new()).await.expect_err("it has no peer");
    assert!(matches!(&told, ClientError::Subsystem(why) if why == "there is nobody"), "{told}");

    let status = client.status().await.expect("status");
    assert_eq!(status.parts.keys().collect::<Vec<_>>(), ["one", "two"]);
    let part = &status.parts["one"];
    assert_eq!(part.json["wheels"], 4);
    assert_eq!(part.rows[0].text, format!("in {}", guest.dir.display()));

    node.stop().await;
    let ended = ["two stops with a word", "one stops with a word"];
    assert_eq!(written(&ours), ended, "before the node leaves the ring");
    // Its files are free, and a start makes new toys.
    let again = guest.config(None);
    let again = Node::start_with(again, &toys).await.expect("starts again");
    assert_eq!(starts(&written(&ours)), ["one starts", "two starts"]);
    again.kill().await;
    assert!(written(&ours).iter().all(|line| !line.contains("stops")), "a crash stops nothing");
    other.stop().await;
    assert!(written(&theirs).contains(&"one stops".to_owned()));
}

#[tokio::test]
async fn a_subsystem_that_cannot_start_keeps_the_node_from_starting() {
    let (home, diary) = (Home::new(), Diary::default());
    let first = toy("one", None, &diary);
    let refusing = diary.clone();
    let second: MakeSubsystem = Arc::new(move |node| {
        let diary = refusing.clone();
        Arc::new(Toy { name: "two", node, peer: None, diary, refuses: true })
    });
    let refused = Node::start_with(home.config(None), &[first.clone(), second]).await;
    let told = refused.expect_err("it cannot start").to_string();
    assert_eq!(told, "toys are out");
    let lines = written(&diary);
    assert!(lines.contains(&"one starts".to_owned()), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("stops")), "{lines:?}");
    // What was open is closed soon: nothing waits for that when a start fails.
    let starting = async {
        loop {
            match Node::start_with(home.config(None), std::slice::from_ref(&first)).await {
                Ok(node) => return node,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let node = tokio::time::timeout(LONG, starting).await.expect("the directory is free");
    node.stop().await;
}
