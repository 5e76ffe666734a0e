// Package resolver is the DNS server of one endpoint. It answers for the names that the
// endpoint's policy allows, and for no others, and tells the programs on the endpoint's link
// which addresses it has given away: rules with names match these alone.
//
//   - A name that no rule names is REFUSED, and so is every type but A and AAAA; HTTPS and
//     SVCB have no data, since they would carry addresses of their own.
//   - The guest's query is not passed on: the resolver asks its upstreams with a message
//     of its own, without the guest's options.
//   - Of an answer, it takes the chain of CNAMEs that begins at the question and the
//     addresses at its end. Where a chain leads is the business of who owns the
//     allowed name: it need not be named in the policy. A guest that asks for a name in
//     the middle of a chain needs a rule for it.
//   - Addresses that are not public (private, the host's, other endpoints', the floor) are left
//     out; if none is left, the answer is REFUSED. So a name cannot be made to point
//     inwards.
//   - Addresses are pinned before the guest gets them, for their time to live, but at
//     least 30 seconds. If they cannot be, the answer is SERVFAIL.
//
// Queries beyond the policy's rate, or beyond 64 at once, get no answer.
package resolver
