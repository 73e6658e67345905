"""What a fit returns, how it is saved, resumed and combined over seeds."""
