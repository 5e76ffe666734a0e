package virtq

// Unpop makes the chain that was popped last available again: the next Pop returns it. Use it in a device that
// finds out only after Pop that it has no data for the chain, for instance because a socket is empty. The chain
// must not have been pushed. Several of the last popped chains must be given back in the reverse order of their
// popping.
func (q *Queue) Unpop(c *Chain) {
	if q.broken != nil {
		return
	}
	q.nextAvail--
	c.reset(q.mem, c.head)
}
