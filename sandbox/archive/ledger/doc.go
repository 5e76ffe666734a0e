// Package ledger keeps, in a store of objects that hosts share, who has which sandbox, which uploads each snapshot
// needs and what may be deleted. There is no server and no scheduler: hosts agree by Swap of package blob alone.
//
// # What it promises
//
//   - A sandbox runs on one host at a time, if its host stops it when Session.Lost is closed.
//   - Its head, once committed, is neither lost nor goes back, whatever the clocks do: a change of a family compares
//     with what its maker has read, and a claim that another has followed changes nothing.
//   - Nothing that a kept snapshot needs is deleted, whatever the clocks do.
//   - A sandbox whose host has died can be claimed after 11/10 of that host's time to live.
//
// It counts upon a store that is linearizable, and on clocks (CLOCK_BOOTTIME) that are each at most a tenth too fast or
// too slow. No clock is compared with another host's. A machine that its hypervisor stops, with its clock, cannot know
// that it is late: what its guest then does reaches the network, but no ledger.
//
// # How
//
// A host's session is the object hosts/NAME, which it renews. A contender that has seen it unchanged for 11/10 of its
// time to live swaps it to ended: this incarnation is dead for ever, and its next renewal fails. The host itself stops
// at 9/10, counted from before it sent its last renewal that was answered.
//
// A sandbox is the object families/NAME. A claim needs that there is no holder, or a dead one, and has a fence, a
// number that grows with each claim. A snapshot is first an intent, which names all uploads that it will need; its
// bytes are uploaded after that. Commit keeps it. An intent lives as long as the claim that made it.
//
// No object is ever deleted or has a content twice, since a counter grows with each change: a request that the network
// repeats, or keeps for an hour, finds another version and fails. A deleted family stays as a tombstone, until a new
// sandbox gets the name.
//
// # Why nothing is deleted too early
//
// An upload is needed if a living snapshot names it. A new snapshot may name fresh uploads, whose keys no one has used
// before, and those that are needed at that moment. So an upload that is not needed once never is again, and it is
// deleted at any later time without asking. A list of what is condemned would not do: after it was worked off, it no
// longer warns the one who has long meant to use an upload again.
package ledger
