"""What is damaged in a store and can be put right: survey, plan and apply."""
