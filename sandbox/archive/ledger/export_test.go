package ledger

// Kill ends what a session does in the background, as the death of its process would.
func Kill(s *Session) {
	s.cancel()
	s.wait.Wait()
}
