use super::*;

const HOLDER: u64 = 77;

/// Several bridges that share a lease, with a common clock.
struct Group {
    now: Instant,
    bridges: Vec<Member>,
}

struct Member {
    table: LeaseTable,
    voice: Voice,
    sight: Arc<AtomicU8>,
    number: u64,
    beat_at: Instant,
    /// Whether the bridge runs. While it does not, it neither sends messages of the lease nor hears them.
    runs: bool,
    is_connected: bool,
}

impl Member {
    fn speaks_at(&self, now: Instant) -> bool {
        self.voice.turn.borrow().is_some() && self.voice.term.holds_at(now)
    }
}

impl Group {
    fn new(count: u64) -> Self {
        let now = Instant::now();
        let member = |bridge| {
            let mut table = LeaseTable::new(bridge, Times::default());
            let (number, voice, sight) = table.add(HOLDER, now).unwrap();
            sight.store(2, Ordering::Release);
            Member {
                table,
                voice,
                sight,
                number,
                beat_at: now,
                runs: true,
                is_connected: true,
            }
        };
        Self {
            now,
            bridges: (1..=count).map(member).collect(),
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(25);
        let now = self.now;
        let mut beats = Vec::new();
        for member in self.bridges.iter_mut().filter(|member| member.runs) {
            member.table.decide(now);
            if member.table.is_news() || now >= member.beat_at {
                member.beat_at = now + Times::default().beat;
                let beat = member.table.beat(now);
                if member.is_connected {
                    beats.push(beat);
                }
            }
        }
        for member in self
            .bridges
            .iter_mut()
            .filter(|member| member.runs && member.is_connected)
        {
            for beat in &beats {
                member
                    .table
                    .heard(LeaseBeat::decode(&beat.encode()).unwrap(), now);
            }
        }
    }

    /// Runs the group for this many `milliseconds`, in steps of 25 ms, and returns the bridges that speak at the end.
    /// Asserts that at most one connected bridge speaks at a time.
    fn run(&mut self, milliseconds: u64) -> Vec<usize> {
        for _ in 0..milliseconds / 25 {
            self.step();
            let together = self
                .speakers()
                .into_iter()
                .filter(|place| self.bridges[*place].is_connected);
            assert!(together.count() <= 1, "two speak at once");
        }
        self.speakers()
    }

    fn speakers(&self) -> Vec<usize> {
        let speaks = |place: &usize| {
            let member = &self.bridges[*place];
            member.runs && member.speaks_at(self.now)
        };
        (0..self.bridges.len()).filter(speaks).collect()
    }

    fn turn(&self, place: usize) -> Option<u64> {
        *self.bridges[place].voice.turn.borrow()
    }
}

#[test]
fn one_speaks_after_it_has_listened_and_alone_as_well() {
    for count in 1..4 {
        let mut group = Group::new(count);
        assert!(group.run(1200).is_empty(), "nobody has listened for long enough");
        assert_eq!(group.run(300), [0]);
        assert_eq!(group.run(5000), [0]);
    }
}

#[test]
fn when_one_dies_the_next_speaks_within_two_seconds_above_its_epoch() {
    let mut group = Group::new(3);
    assert_eq!(group.run(2000), [0]);
    group.bridges[0].voice.epoch.store(500, Ordering::Release);
    group.run(500);
    group.bridges[0].runs = false;
    assert_eq!(group.run(2000), [1]);
    assert_eq!(group.turn(1), Some(500));
}

#[test]
fn when_one_leaves_in_good_order_the_next_speaks_at_once() {
    let mut group = Group::new(2);
    assert_eq!(group.run(2000), [0]);
    let number = group.bridges[0].number;
    group.bridges[0].table.remove(HOLDER, number + 1);
    assert_eq!(group.run(500), [0], "that was another one");
    group.bridges[0].table.remove(HOLDER, number);
    assert_eq!(group.run(300), [1]);
}

#[test]
fn one_that_stood_still_or_was_cut_off_is_silent_before_another_speaks_and_when_it_is_back() {
    for is_stopped in [true, false] {
        let mut group = Group::new(2);
        assert_eq!(group.run(2000), [0]);
        group.bridges[0].runs = !is_stopped;
        group.bridges[0].is_connected = is_stopped;
        let mut handed_over = false;
        for _ in 0..2000 / 25 {
            group.step();
            let first = group.bridges[0].speaks_at(group.now);
            let second = group.bridges[1].speaks_at(group.now);
            assert!(!(first && second), "both speak");
            handed_over |= second;
        }
        assert!(handed_over);
        (group.bridges[0].runs, group.bridges[0].is_connected) = (true, true);
        assert!(
            !group.bridges[0].speaks_at(group.now),
            "silent before it has looked"
        );
        assert_eq!(group.run(5000), [1]);
    }
}

#[test]
fn when_all_were_cut_off_the_last_that_spoke_goes_on_whoever_is_back_first() {
    for (first, later) in [(0, 1), (1, 0)] {
        let mut group = Group::new(2);
        assert_eq!(group.run(2000), [0]);
        group
            .bridges
            .iter_mut()
            .for_each(|member| member.is_connected = false);
        assert!(group.run(2000).is_empty());
        group.bridges[first].is_connected = true;
        group.run(200);
        group.bridges[later].is_connected = true;
        assert_eq!(group.run(900), [0]);
        assert_eq!(group.run(3000), [0]);
    }
}

#[test]
fn of_two_that_were_apart_the_higher_epoch_speaks() {
    let mut group = Group::new(2);
    assert_eq!(group.run(2000), [0]);
    group.bridges[0].voice.epoch.store(500, Ordering::Release);
    // A bridge of the same group that has not heard of this bridge, because its connection was broken.
    let far = FollowedHolder {
        holder: HOLDER,
        sight: 2,
        epoch: Some(601),
    };
    let now = group.now;
    group.bridges[0].table.heard(LeaseBeat::new(9, 1, vec![far]), now);
    assert_eq!(group.bridges[0].table.decide(now).ended, 1);
    // A claim with a lower epoch does not end this bridge's turn.
    let mut group = Group::new(1);
    assert_eq!(group.run(2000), [0]);
    group.bridges[0].voice.epoch.store(900, Ordering::Release);
    let now = group.now;
    group.bridges[0].table.heard(LeaseBeat::new(9, 1, vec![far]), now);
    assert_eq!(group.bridges[0].table.decide(now).ended, 0);
}

#[test]
fn who_sees_better_speaks() {
    let mut group = Group::new(2);
    group.bridges[0].sight.store(1, Ordering::Release);
    assert_eq!(group.run(2500), [1]);
    // Another bridge that sees the holder better for a moment does not take over.
    group.bridges[0].sight.store(2, Ordering::Release);
    group.bridges[1].sight.store(0, Ordering::Release);
    assert_eq!(group.run(700), [1]);
    group.bridges[1].sight.store(2, Ordering::Release);
    assert_eq!(group.run(3000), [1]);
    group.bridges[1].sight.store(0, Ordering::Release);
    assert_eq!(group.run(1600), [0]);
    assert_eq!(group.run(3000), [0]);
}

#[test]
fn beats_of_others_are_bounded() {
    let mut group = Group::new(1);
    let now = group.now;
    let table = &mut group.bridges[0].table;
    for bridge in 100..100 + PEERS_MAX as u64 + 9 {
        let followed = |holder| FollowedHolder {
            holder,
            sight: 0,
            epoch: None,
        };
        table.heard(LeaseBeat::new(bridge, 1, (0..1000).map(followed).collect()), now);
    }
    assert_eq!(table.peers.len(), PEERS_MAX);
    assert!(table.peers.values().all(|peer| peer.holders.len() <= 1));
    table.decide(now + Times::default().silence);
    assert!(table.peers.is_empty());
}
