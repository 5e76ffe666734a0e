// Package e2btest tests package e2b as its clients see it: with the unmodified npm package e2b, with hostile requests,
// and on guests whose agent and programs are real.
package e2btest
