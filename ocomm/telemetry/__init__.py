"""What the runtime tells about itself: the timeline. Below everything that writes to it, so that all layers may."""
