// Package resolver is the DNS server of one endpoint. It answers for the names that the endpoint's policy allows,
// and for no others. It tells the programs on the endpoint's link which addresses it has given the guest: rules
// with names match only these.
//
//   - It answers REFUSED for a name that no rule has, and for every type but A and AAAA; HTTPS and
//     SVCB have no data, since they would carry addresses of their own.
//   - It does not forward the guest's query: it asks its upstreams with a message of its own,
//     without the guest's options.
//   - Of an answer, it takes the chain of CNAMEs that begins at the question and the
//     addresses at its end. The owner of the allowed name decides where a chain leads: the policy
//     need not have the targets. A guest that asks for a name in the middle of a chain needs a
//     rule for it.
//   - It leaves out addresses that are not public (private, the host's, other endpoints', the floor).
//     If none is left, the answer is REFUSED. So no name can point inwards.
//   - It pins addresses before the guest gets them, for their time to live, but at
//     least 30 seconds. If it cannot pin them, the answer is SERVFAIL.
//
// Queries beyond the policy's rate, or beyond 64 at once, get no answer.
package resolver
