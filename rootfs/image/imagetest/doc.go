// Package imagetest makes tar streams for tests of images, and compares what came of them.
package imagetest
