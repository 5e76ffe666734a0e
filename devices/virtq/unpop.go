package virtq

// Unpop makes the chain that was popped last available again: the next Pop
// returns it. It is for a device that finds out only with the chain in hand that
// it has nothing to put in, for instance because a socket turned out to be
// empty. The chain must not have been pushed; several chains, the last ones that
// were popped, are given back in the reverse order of their popping.
func (q *Queue) Unpop(c *Chain) {
	if q.broken != nil {
		return
	}
	q.nextAvail--
	c.reset(q.mem, c.head)
}
